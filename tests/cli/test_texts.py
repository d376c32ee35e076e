"""What people read: each text from data that take its less common branches."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.conftest import seal

from tidegate.checkpoints.batch_notes import QueryPosition, SinkPlan, SinkRewind, SourceProgress
from tidegate.checkpoints.restore import RestorePlan
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.infra.demo import Demo
from tidegate.jobs.advise.lag_advice import LagAdvice, LagTarget, LatenessCurve
from tidegate.jobs.cli import output
from tidegate.jobs.cli.status_and_logs import describe_pipeline
from tidegate.jobs.engine.what_if import WhatIfReport
from tidegate.jobs.sinks.exactness_audit import ExactnessReport
from tidegate.jobs.spec.field_rules import ChangeEffect
from tidegate.jobs.spec.spec_changes import SpecChange
from tidegate.jobs.splice.impact import Impact, TableImpact

MINUTE = 60_000_000


class Text:
    """Renders templates and reads what was printed, with single spaces."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, template: str, **values: Any) -> list[str]:
        """The lines that are not empty."""
        output.print_text(template, **values)
        return self.read_lines()

    def read_lines(self) -> list[str]:
        lines = (" ".join(line.split()) for line in self._capsys.readouterr().out.splitlines())
        return [line for line in lines if line]


@pytest.fixture
def text(capsys: pytest.CaptureFixture[str]) -> Text:
    return Text(capsys)


def test_texts_of_users_stay_as_they_are(text: Text) -> None:
    """Neither brackets nor names of emoji mean anything, in cells, headings and lines."""
    output.print_rendered(output.format_table(["k [c]", "note"], [["[red]x", "[/]"], ["a:b:c", 1]]))
    output.print_line("at 12:b:3 [bold]")
    assert text.read_lines() == ["k [c] note", "[red]x [/]", "a:b:c 1", "at 12:b:3 [bold]"]


def test_a_text_of_a_user_stays_in_its_cell(text: Text) -> None:
    """Also with line breaks and with the sign that separates cells in templates."""
    request = {"id": "s1", "state": "created", "row_count": 1200, "origin": "late"}
    times = {"min_time": 0, "max_time": None, "created_at": None}
    lines = text("splices", data=[request | times | {"who": "a\u00a6b", "why": "one\n[/] two"}])
    assert lines[1] == "s1 created 1,200 late 1970-01-01T00:00:00Z to none a|b one [/] two"
    assert len(lines) == 2


def test_numbers_are_aligned_to_the_right() -> None:
    """Also those with an exponent; a column with one text is aligned to the left."""
    cells = [[1e-07, 1, "1"], [25.0, 1_000, "x"]]
    rows = output.format_table(["a", "b", "c"], cells).splitlines()
    assert rows[1:] == ["1e-07     1  1", " 25.0  1000  x"]


def test_a_plan_of_a_restore_says_what_happens_to_each_sink(text: Text) -> None:
    """Every way in which a sink follows has words."""
    sinks = [
        SinkPlan(query="q", newest=1200, batch=batch, sink="Sink\nof q", rewind=rewind)
        for rewind, batch in zip(SinkRewind, [None, 1100, 2, 3, 4, 5], strict=True)
    ]
    plan = RestorePlan(
        pipeline="p",
        target=None,
        timeline=0,
        slot=3,
        sha256=None,
        head="t0-000003-ab",
        epochs_rewound=1200,
        epochs_regained=3,
        rows={"read": -3000, "late": 0},
        tables={"events": 1000},
        windows={"w": 20},
        since=None,
        spec_changed=True,
        sinks=tuple(sinks),
    )
    lines = text("restore", plan=plan, changes=[])
    assert lines[0] == (
        "p: from t0-000003-ab back to beginning; 1,200 epochs are taken back,"
        " 3 of an older timeline come back"
    )
    assert lines[2:5] == ["rows read -3,000", "table events 1,000", "window results of w 20"]
    assert lines[6].startswith("q 1,200 beginning Sink of q its log is cut")
    assert lines[7].startswith("q 1,200 1,100 Sink of q the script's on_restore")
    assert lines[12:] == ["the spec has changed since then"]
    change = SpecChange("windows.w: removed", ChangeEffect.DROPPED, "its\nrows go")
    lines = text("restore", plan=plan, changes=[change])
    assert lines[-1] == "windows.w: removed dropped its rows go"


def test_the_status_of_a_job_describes_its_queries(log: SlotLog, text: Text) -> None:
    """Its slowest phase, what waits, and which source holds the watermark."""
    sources = (SourceProgress(name="a", rows=1000, backlog=2000), SourceProgress(name="b", rows=1))
    full = QueryPosition(
        batch=7,
        rewind=SinkRewind.LOG,
        sink="file",
        rows=1001,
        dropped=3,
        watermark=0,
        sources=sources,
        phases={"triggerExecution": 9.0, "addBatch": 6.0, "queryPlanning": 1.0},
        holder="a",
        seconds=9.0,
    )
    lost = QueryPosition(batch=0, rewind=SinkRewind.LOG)
    queries = {"q": full.model_dump(mode="json"), "r": lost.model_dump(mode="json")}
    more: dict[str, Any] = {
        "landings": {},
        "store": {"url": "memory"},
        "queries": queries,
        "deployed": None,
    }
    lines = text("status", data=describe_pipeline(log) | more, waiting={})
    assert "query q: batch 7 in 9.00 s (addBatch 6.00 s), rows 1,001 (1,000 of a, 1 of b)," in (
        found := " ".join(lines)
    )
    assert ", a 2,000 messages behind, at least 3 dropped, watermark 1970-01-01T00:00:00Z" in found
    assert "held by a, state 0 rows, 0 bytes, to file" in found
    assert "query r: batch 0, rows 0, watermark none, state 0 rows, 0 bytes, to" in found


def test_a_status_says_how_fresh_the_tables_are_and_what_lands(log: SlotLog, text: Text) -> None:
    """A source that misses its goal, one that never ran, and one whose status is not known."""
    seal(log, counts={"dead_objects": 2, "nulls_filled": 5})
    stages = {"sealed": [1.0, 2.0, 3000.0], "visible": [2.0, 3.0, 4000.0]}
    report = describe_pipeline(log) | {
        "freshness": {"EWR": stages, "JFK": stages},
        "stale": {"EWR": 5},
        "store": {"url": "memory"},
        "deployed": {"who": "ann", "at": 0, "commit": "ab12"},
        "landings": {
            "EWR": {"state": "never ran", "why": None},
            "JFK": {"state": "unknown", "why": "no\nanswer"},
        },
    }
    report["counts"] |= {"stream_rejections": {"s": 1000}, "rules": {"r": 2000}}
    found = " ".join(text("status", data=report, waiting={"web": 1000}))
    times = "sealed 1.0 / 2.0 / 3,000.0 s, visible 2.0 / 3.0 / 4,000.0 s after arrival"
    assert f"freshness: EWR: {times} (p50 / p95 / p99), beyond its goal freshness:" in found
    assert f"freshness: JFK: {times} (p50 / p95 / p99) behind: web by 1,000 messages" in found
    assert "set aside: 2 whole objects, 0 rows known of them" in found
    assert "rejected by s: 1,000 rows rule r: 2,000 rows broke it" in found
    assert "rows without a declared column, read as null: 5" in found
    assert "EWR never ran JFK unknown (no answer)" in found
    assert "deployed: by ann, " in found
    assert " ago, commit ab12 " in found


def test_nothing_sealed_yet_is_said(log: SlotLog, text: Text) -> None:
    """By a status without driver, checkpoint, holder and rows."""
    report = describe_pipeline(SlotLog(log.store, "new"))
    more: dict[str, Any] = {"landings": {}, "store": {"url": "u"}, "deployed": None}
    found = " ".join(text("status", data=report | more, waiting={}))
    assert "driver: none checkpoint: none sealed yet" in found
    assert "frontier: none held by: no one rows: none" in found


def test_an_impact_lists_changes_of_streams_and_windows(text: Text) -> None:
    """Rows added, removed and changed; so many of a table, and how many more there are."""
    rows: list[dict[str, Any]] = [
        {"id": "a/0/1", "old": None, "new": {"v": 1}},
        {"id": "a/0/2", "old": {"v": 1}, "new": None},
        {"id": "a/0/3", "old": {"v": "x\ny", "w": 1}, "new": {"v": "z", "w": 1}},
    ]
    window = {"key": {"k": "a"}, "window_start": "2026", "revision": 1}
    tables = [
        TableImpact(table="events", added=1000, moved=2000, changes=[{"new": {}}]),
        TableImpact(table="s", added=1, removed=1, changed=1, first="1", last="2", changes=rows),
        TableImpact(
            table="w", changed=4, changes=[window | {"old": {"n": 1}, "new": {"n": 2}}] * 4
        ),
    ]
    cost = {"rows_read": 1000, "rows_written": 2, "seconds": 0.25}
    impact = Impact(
        pipeline="p",
        request="s1",
        rows=3,
        already=1000,
        head=None,
        tables=tables,
        cost=cost,
        digest="d",
    )
    request = SimpleNamespace(origin="dead_letters", who="ann", why="")
    assert text("impact", request=request, impact=impact, shown=3) == [
        "splice request s1 of p: 3 rows from dead letters, asked for by ann",
        "merged before, left out: 1,000",
        "events: 1,000 added; 2,000 rows behind them move, none is written again",
        "s: 1 added, 1 changed, 1 removed, 1 to 2",
        "w: 4 changed",
        "cost: 1,000 rows read, 2 written, about 0.2 s",
        "digest d",
        "s a/0/1 added: v: 1",
        "s a/0/2 removed: v: 1",
        "s a/0/3 v: x y -> z",
        *["w k=a 2026 n: 1 -> 2 (revision 1)"] * 3,
        "w and 1 more: --json or --html FILE",
    ]
    nothing = impact.model_copy(update={"tables": []})
    assert "nothing is left to merge" in text("impact", request=request, impact=nothing, shown=3)


@pytest.mark.parametrize(
    ("checkpoint", "again", "actual", "said"),
    [
        (None, False, None, "s1: no rows were left to merge"),
        ("c", True, None, "s1 was merged before, in c"),
        ("c", False, "d", "s1 is merged in c: exactly what the report said (2.0 s)"),
        ("c", False, "e", "s1 is merged in c: NOT what the report said (2.0 s)"),
    ],
)
def test_a_merge_says_whether_it_did_what_was_reported(
    text: Text, checkpoint: str | None, again: bool, actual: str | None, said: str
) -> None:
    """The digest of the sealed rows is compared with that of the report."""
    data = {"request": "s1", "checkpoint": checkpoint, "again": again, "seconds": 2.0}
    assert text("merge", data=data | {"promised": "d", "actual": actual}) == [said]


def test_advice_has_a_row_for_a_source_without_rows(text: Text) -> None:
    """Its columns stay empty; rows of large epochs that were not sketched are counted."""
    shares = [Fraction(1, 10_000), Fraction(1, 1000), Fraction(1, 100)]
    targets = tuple(LagTarget(share, 0, -MINUTE) for share in shares)
    about: dict[str, Any] = {"present": MINUTE, "read": 2000, "late": 1, "targets": targets}
    known = LagAdvice("a", LatenessCurve({0: 1000}), **about)
    empty = LagAdvice("b", LatenessCurve({}))
    data = {"pipeline": "p", "epochs": 5, "plot": "a.png"}
    lines = text("advice", data=data, advice=[known, empty], shares=shares)
    assert lines[2:] == [
        "a 0 0 0 1m 0 % 0.05 % 1,000",
        "b unknown 0",
        "a: results wait 1m for late rows; 1m less for 0.01 % late, 1m less for 0.1 % late,"
        " 1m less for 1 % late",
        "b: its lag is not known here; give the path of the spec",
        "1,000 of 2,000 rows read are in these sketches",
        "drawn: a.png",
    ]


def test_what_if_names_barriers_and_epochs_that_come_out_differently(text: Text) -> None:
    """A defect of tidegate, which the person is asked to report."""
    report = WhatIfReport(first=1, last=2, epochs=2, not_reproduced={2: ("frontier", "holder")})
    report.points.append((2, 0, 0, MINUTE))
    report.other.barriers["timeout"] = 2
    report.other.waits.append(MINUTE)
    report.happened.idle["a"] = 1
    found = " ".join(text("whatif", data={"pipeline": "p", **report.to_record()}, report=report))
    assert "frontier at the end 1970-01-01T00:00:00Z 1970-01-01T00:01:00Z" in found
    assert "a idle 1 times, 0 never barriers timeout 0 2 barriers waited, 99 % 1m" in found
    assert "epoch 2 comes out differently with its own options: frontier, holder; this" in found


def test_a_check_names_everything_that_it_could_not_compare(text: Text) -> None:
    """Retired epochs, topics, objects set aside and windows; and what may delete the objects."""
    data: dict[str, Any] = {
        "rows": {"a": {"read": 2000, "late": 1}, "b": {}},
        "retired_upto": 7,
        "topics": ["b"],
        "set_aside": {"a": {"dead_objects": 1, "columns_left_out": 3}},
        "windows": {"w": 1000},
        "skipped": {"v": "why"},
        "problems": [],
        "bucket_rules": ["a rule"],
    }
    lines = text("check", data=data, columns=["read", "late"])
    assert lines[:3] == ["source read late", "a 2,000 1", "b 0 0"]
    assert lines[3].startswith("retired epochs, and rows read up to 7, are not compared")
    assert lines[4].startswith("source b: a topic")
    assert lines[5].startswith(
        "source a: 1 objects were set aside as a whole, 0 rows known of them"
    )
    assert lines[6].startswith("source a: 3 rows of objects with columns")
    assert lines[7:] == [
        "window w: 1,000 results compared",
        "window v: not compared, why",
        "what was compared is exact",
        "warning: a rule",
    ]
    found = text("check", data=data | {"problems": ["one", "two"]}, columns=["read", "late"])
    assert found[-3:] == ["one", "two", "warning: a rule"]


def test_a_replay_that_differs_says_where(text: Text) -> None:
    """Tables and fields of the decision."""
    data = {"checkpoint": "c", "equal": False, "tables": {"events": (1000, 999, 1)}}
    lines = text("replay", data=data | {"decided_differently": ["frontier", "late"]})
    assert lines[2:] == [
        "events 1,000 999 1",
        "decided differently: frontier, late",
        "NOT equal",
    ]


def test_a_diff_names_a_changed_spec(log: SlotLog, text: Text) -> None:
    """Also if all else is equal."""
    one = log.head().record
    data: dict[str, Any] = {"left": "a", "right": "b", "same": True, "spec_changed": True}
    about = {"left": one, "right": one, "raw": False}
    assert text("diff", data=data, **about) == ["a and b are equal, except for the spec"]
    parts: dict[str, Any] = {
        key: {} for key in ("counters", "positions", "decider", "state", "tables")
    }
    lines = text("diff", data=data | parts | {"same": False}, **about)
    assert lines == ["what name a b", "spec digest changed"]


def test_a_checkpoint_says_where_objects_were_read_up_to(log: SlotLog, text: Text) -> None:
    """By ordinal and row; the segments of the state are summed up by kind."""
    segment = SimpleNamespace(kind="order", rows=600, bytes=1000)
    manifest = seal(log, cut={"a/0": {"resume": {"ordinal": 3, "row": 7}, "pending": True}})
    shown = manifest.model_copy(update={"segments": (segment, segment)})
    about = {"counters": {"read": 1000}, "timings": [("move", 0.5)]}
    lines = text("checkpoint", manifest=shown, **about)
    assert "a/0 object 3, row 7 yes" in lines
    assert "state order 2 1,200 2.0 kB" in lines


def test_the_stack_says_where_everything_is(text: Text) -> None:
    """Addresses, the file with the logins, and the command that ends it."""
    data = {"airflow": "http://a", "minio": "http://m", "credentials": "/k"}
    assert text("stack", data=data) == [
        "Airflow http://a",
        "MinIO http://m",
        "logins /k (mode 0600; admin, olga, uwe, vic)",
        "look tidegate status --store stack",
        "stop tidegate down",
    ]


def test_the_demo_shows_every_row_and_what_it_measured(text: Text) -> None:
    """Counts of the tables win over those of the manifest; a mistake has a line of its own."""
    stack = SimpleNamespace(
        airflow_url="http://a", credentials_file="c.json", store_url="s3://b", home="h"
    )
    demo = Demo(stack, None, 1.0)  # type: ignore[arg-type]  # it is only shown
    demo.noticed, demo.gap, demo.elapsed, demo.stream = 1.23, 4.5, 350.2, "success"
    demo.recovered_from, demo.restored_to = "t0-000002-ab", "t0-000001-ab"
    demo.quality = {"verdict": "pass", "docs": "flights/quality/docs/x/index.html"}
    demo.exactness = ExactnessReport(
        rows={"EWR": {"read": 10, "released": 7, "late": 2}}, windows={"w": 4}
    )
    epochs: Any = [
        SimpleNamespace(
            counters=SimpleNamespace(per_source={"EWR": {"read": 9, "dropped": 1}}),
            epoch_counters=SimpleNamespace(windows={"w": 3}),
            timings=timings,
            barriers=[{"outcome": "complete"}],
        )
        for timings in ({"plan": 0.1, "move": 0.3}, {"move": 0.5, "seal_before": 0.012})
    ]
    demo.epochs = epochs
    lines = text("demo", demo=demo, keep=True)
    assert lines[1:3] == [
        "airport read released late dropped rejected dead retained",
        "EWR 10 7 2 1 0 0 0",
    ]
    assert "windows, revisions: 4 windows, 2 later revisions" in lines
    assert "barriers (day_close): 2 complete" in lines
    assert "epoch, median and p95: 0.46 s, 0.51 s" in lines
    assert "seal, median and p95: 12 ms, 12 ms" in lines
    assert "Data Docs: http://a/tidegate/docs/flights.quality/x/index.html" in lines
    assert demo.is_good
    demo.exactness.problems.append("1 row is missing")
    epochs[0].barriers = epochs[1].barriers = []
    lines = text("demo", demo=demo, keep=False)
    assert "tables against a recomputation: 1 row is missing" in lines
    assert "barriers (day_close): none" in lines
    assert "The stack is going down." in lines[-1]
    assert not demo.is_good
