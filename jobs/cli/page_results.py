"""Answers the Streams page's questions about tables and rows, one line of JSON each.

Airflow's processes do not import the table libraries, and a new process needs seconds to do so.
The API server therefore keeps one such process per store (`operators/child_processes.py`).
"""

import io
import json
import os
import select
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from tidegate.checkpoints.checkpoint_specs import read_newest_spec
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import TidegateError
from tidegate.jobs.engine.arrow_tables import convert_to_ticks, list_rows
from tidegate.jobs.engine.manifest_writer import SPLICE_KIND
from tidegate.jobs.engine.recorded_epochs import read_recorded_epochs
from tidegate.jobs.engine.what_if import WhatIfOptions, run_what_if
from tidegate.jobs.sinks.base_follower import read_stored_position
from tidegate.jobs.sinks.lineage_position import (
    CurrentLineage,
    FollowerPosition,
    read_published_cut,
)
from tidegate.jobs.sinks.published_tables import (
    RowSelection,
    describe_table,
    flatten_for_csv,
    quote_formulas,
    scan_table,
    select_current_revisions,
    to_json_line,
)
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.splice.row_trace import trace_rows
from tidegate.json_types import JsonObject, JsonView

from .errors import NO_SEALED_SPEC, UNEXPECTED

_IDLE_SECONDS = 600.0
# Newest rows of a table that are counted, filtered and sampled: read in a fraction of a second.
_NEWEST_ROWS = 20_000
_SAMPLE_ROWS = 20
_EPOCHS_READ = (20, 200, 2_000)
_CHART_LINES = 8
_CHART_WINDOWS = 120
_EPOCHS_DECIDED = 1_000  # one GET each; the page waits for 15 s at most
_FILTERS = ("reason", "output", "_source")


class PipelineResults:
    """Answers questions about the tables and rows of one pipeline."""

    def __init__(self, spec: PipelineSpec, log: SlotLog) -> None:
        self._spec, self._log = spec, log

    def list_tables(self) -> JsonObject:
        """Return each table with its rows and address, and the columns that can identify a row."""
        names = self._spec.table_names
        return {
            "tables": [
                {"table": name, "window": name in self._spec.windows}
                | describe_table(self._spec, self._log.store, name)
                for name in names
            ],
            "columns": [*self._spec.columns, "_source", "_partition", "_seq"],
        }

    def prove_recovery(self) -> JsonObject:
        """Return how far tables and sinks follow the log, and whether the rows add up.

        `followers` have a name, the timeline that they follow, and how many slots of the current
        lineage they still lack. `counts` compare rows by the checkpoint that the tables show. The
        events are left out if a merge has changed them, or if they are not kept.
        """
        log, name = self._log, self._spec.name
        lineage, cut = CurrentLineage(log, log.head()), read_published_cut(log.store, name)
        shown = FollowerPosition(cut.timeline, cut.upto) if cut else None
        positions = [("tables", shown)]
        for sink in self._spec.sinks:
            stored = read_stored_position(log.store, name, sink)
            positions.append((sink, stored.position if stored else None))
        followers = [
            {
                "name": follower,
                "timeline": position.timeline if position else None,
                "missing": lineage.count_missing_slots(position),
            }
            for follower, position in positions
        ]
        counts = list(self._compare_counts(shown))
        return {"timeline": lineage.timeline, "followers": followers, "counts": counts}

    def _compare_counts(self, shown: FollowerPosition | None) -> Iterator[JsonObject]:
        if shown is None:
            return
        segments = self._log.lineage(shown.timeline)
        timeline = next((s.timeline for s in segments if s.contains(shown.upto)), None)
        slot = None if timeline is None else self._log.read_slot(timeline, shown.upto)
        if slot is None or not isinstance(slot.record, Manifest):
            return
        counters, spec = slot.record.counters, self._spec
        yield {"what": "read", "sealed": counters.read, "found": counters.accounted_rows()}
        merged = any(file.kind == SPLICE_KIND for file in slot.record.segments)
        if spec.outputs.events and not merged:
            stored = describe_table(spec, self._log.store, EVENTS)["rows"]
            yield {"what": EVENTS, "sealed": counters.released, "found": stored}

    def sample_rows(self, table: str, **equal: str) -> JsonObject:
        """Return the newest 20 rows with the given values, newest first, and the values to offer.

        Only the newest 20,000 rows of the table are searched, and only `reason`, `output` and
        `_source` filter. Of a window also the data of a chart.
        """
        newest = self._read_newest(table)
        filters = [name for name in _FILTERS if name in newest.column_names]
        choices = {
            name: sorted(((pair["values"], pair["counts"]) for pair in counts), key=str)
            for name in filters
            if len(counts := newest[name].value_counts().to_pylist()) > 1 or name in equal
        }
        rows = _select_equal(newest, equal)
        return {
            "columns": rows.column_names,
            "rows": list_rows(rows.slice(max(0, rows.num_rows - _SAMPLE_ROWS)))[::-1],
            "matching": rows.num_rows,
            "searched": newest.num_rows,
            "choices": choices,
            "chart": self._chart_window(table, newest),
        }

    def export_rows(self, table: str, **equal: str) -> JsonObject:
        """Return the rows that `sample_rows` searches and that have the given values, as CSV.

        Texts are safe to open in a spreadsheet (`quote_formulas`).
        """
        text = io.BytesIO()
        rows = flatten_for_csv(_select_equal(self._read_newest(table), equal))
        pyarrow.csv.write_csv(quote_formulas(rows), text)
        return {"csv": text.getvalue().decode()}

    def find_rows(self, /, **fields: str) -> JsonObject:
        """Return where the rows with the given values are (`tidegate row`)."""
        traces = trace_rows(self._spec, self._log, fields)
        return {"rows": [trace.model_dump(mode="json") for trace in traces]}

    def decide_again(self, /, **options: str) -> JsonObject:
        """Return what `tidegate whatif` says about the newest 1,000 epochs.

        Args:
            options: ``lag.SOURCE``, ``idle.SOURCE`` or ``idle`` -> duration.
        """
        lags: list[str] = []
        idle: list[str] = []
        for name, text in options.items():
            option, dot, source = name.partition(".")
            (idle if option == "idle" else lags).append(f"{source}={text}" if dot else text)
        tried = WhatIfOptions.parse(self._spec, lags, idle)
        first = max(1, self._log.head().slot - _EPOCHS_DECIDED + 1)
        epochs = read_recorded_epochs(self._log, self._spec, first)
        present = {
            name: {"lag": source.lag, "idle": source.coalesce.idle_timeout}
            for name, source in self._spec.sources.items()
        }
        return {
            **run_what_if(self._spec.name, epochs, tried).to_record(),
            "present": {"idle": self._spec.coalesce.idle_timeout, "sources": present},
        }

    def _read_newest(self, name: str) -> pa.Table:
        """Rows of the newest epochs, oldest first: `_NEWEST_ROWS` of them, or all there are."""
        cut = read_published_cut(self._log.store, self._spec.name)
        upto = cut.upto if cut else 0
        for reach in (*_EPOCHS_READ, upto):
            newest = RowSelection(since=max(0, upto - reach))
            rows = scan_table(self._spec, self._log.store, name, newest)
            if rows.num_rows >= _NEWEST_ROWS or reach >= upto:
                break
        return rows.slice(max(0, rows.num_rows - _NEWEST_ROWS))

    def _chart_window(self, name: str, rows: pa.Table) -> JsonObject | None:
        """The newest results of a window, by aggregate, time and key."""
        window = self._spec.windows.get(name)
        if window is None:
            return None
        current = select_current_revisions(rows, window)
        numbers = [
            aggregate
            for aggregate in window.aggregates
            if pa.types.is_integer(kind := current.schema.field(aggregate).type)
            or pa.types.is_floating(kind)
        ]
        points: defaultdict[int, JsonObject] = defaultdict(dict)
        sizes: Counter[str] = Counter()
        starts = convert_to_ticks(current["window_start"]).to_pylist()
        for start, result in zip(starts, list_rows(current), strict=True):
            key = ", ".join(str(result[k]) for k in window.keys) or name
            points[start][key] = {n: result[n] for n in numbers}
            sizes[key] += 1
        largest = [key for key, _ in sizes.most_common(_CHART_LINES)]
        shown = sorted(points.items())[-_CHART_WINDOWS:]
        return {
            "aggregates": numbers,
            "keys": sorted(largest),
            "left_out": len(sizes) - len(largest),
            "points": [{"at": start // 1000, "results": keys} for start, keys in shown],
        }


def _select_equal(rows: pa.Table, equal: Mapping[str, str]) -> pa.Table:
    for name, value in equal.items():
        if name in _FILTERS and name in rows.column_names:
            rows = rows.filter(pc.equal(rows[name], value))
    return rows


_ANSWERS: Mapping[str, Callable[..., JsonObject]] = {
    "tables": PipelineResults.list_tables,
    "proof": PipelineResults.prove_recovery,
    "sample": PipelineResults.sample_rows,
    "export": PipelineResults.export_rows,
    "row": PipelineResults.find_rows,
    "whatif": PipelineResults.decide_again,
}


def answer_question(store: Store, question: JsonView) -> JsonObject:
    """Return the answer under `data`, or what went wrong under `error`.

    Args:
        store: the bucket.
        question: `pipeline`, `ask` (a key of `_ANSWERS`) and its `arguments`.
    """
    try:
        log = SlotLog(store, question["pipeline"])
        spec = read_newest_spec(log)
        if spec is None:
            raise NO_SEALED_SPEC(pipeline=log.pipeline)
        answer = _ANSWERS[question["ask"]]
        return {"data": answer(PipelineResults(spec, log), **question["arguments"])}
    except TidegateError as error:
        return {"error": error.as_dict()}
    except Exception as error:
        return {"error": UNEXPECTED(kind=type(error).__name__, text=error).as_dict()}


def main() -> None:
    """Answer until the caller ends, or has asked nothing for ten minutes."""
    store = open_store(os.environ["TIDEGATE_STORE"])
    answers, sys.stdout = sys.stdout, sys.stderr  # a library's words must not be taken for answers
    print("ready", file=answers, flush=True)
    while select.select([sys.stdin], [], [], _IDLE_SECONDS)[0] and (line := sys.stdin.readline()):
        answer = answer_question(store, json.loads(line))
        print(to_json_line(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
