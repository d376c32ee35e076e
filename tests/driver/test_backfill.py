"""A batch run beside a stream, and what their comparison says.

Real engine, store and tables; rows move in plain Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.e2e.drivers import Steady
from tests.oracle.mover import OracleMover
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.cli.main import app as tidegate
from tidegate.jobs.driver import backfill, pipeline_run
from tidegate.jobs.driver.backfill import compare_results, is_equal, make_batch_spec
from tidegate.jobs.driver.pipeline_run import RunContext, RunOptions, run_pipeline
from tidegate.jobs.engine.interfaces import Mover
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources import object_source
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.loader import parse_spec

START = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = parse_spec("""\
apiVersion: tidegate/v1
name: p
sources: {one: {path: inbox, schema: {at: timestamp, k: string, v: double}, event_time: at, lag: 1m, limits: {objects: 1}}}
windows: {w: {kind: tumbling, size: 1h, keys: [k], aggregates: {n: count(*), total: sum(v)}, lateness: 0s}}
""")
WINDOW = SPEC.windows["w"]


def _row(hour: int, key: str = "a", n: int = 1, total: float | None = 0.5) -> dict[str, Any]:
    begin = START + timedelta(hours=hour)
    return {
        "k": key,
        "window_start": begin,
        "window_end": begin + timedelta(hours=1),
        "n": n,
        "total": total,
    }


def test_equal_results_are_equal() -> None:
    """Sums of floats may differ in their last digits; nothing equals nothing."""
    stream = [_row(0, total=0.1 + 0.2), _row(1, total=None)]
    found = compare_results(WINDOW, stream, [_row(0, total=0.3), _row(1, total=None)])
    assert (found["equal"], found["different"], found["only_stream"], found["only_batch"]) == (
        2,
        0,
        0,
        0,
    )


def test_what_differs_is_counted_and_named() -> None:
    """A row that came too late for the stream is in the batch's result."""
    stream, batch = (
        [_row(0), _row(1), _row(2, "a")],
        [_row(0, n=2), _row(1), _row(1, "b"), _row(2, "b")],
    )
    found = compare_results(WINDOW, stream, batch)
    assert (found["equal"], found["different"], found["only_stream"], found["only_batch"]) == (
        1,
        1,
        1,
        2,
    )
    (shown,) = found["examples"]["different"]
    assert (shown["stream"]["n"], shown["batch"]["n"]) == ("1", "2")


@pytest.mark.parametrize("swapped", [False, True])
def test_what_one_side_has_not_closed_is_not_held_against_it(swapped: bool) -> None:
    """The stream may have closed less than the batch, or more; that is not a difference."""
    sides = [[_row(0)], [_row(0), _row(1), _row(2)]]
    found = compare_results(WINDOW, *(reversed(sides) if swapped else sides))
    assert (found["equal"], found["only_stream"], found["only_batch"]) == (1, 0, 0)
    assert found["uncompared"] == 2
    assert is_equal(found)


def test_a_side_without_results_is_not_equal() -> None:
    """Without one side nothing is proven; two sides without results are equal."""
    found = compare_results(WINDOW, [], [_row(0)])
    assert (found["only_batch"], found["uncompared"], is_equal(found)) == (0, 1, False)
    assert is_equal(compare_results(WINDOW, [], []))


def test_the_batch_takes_all_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first epoch is not cut where an epoch of a stream is.

    The rows after it would be late.
    """
    monkeypatch.setattr(object_source, "_MAX_OBJECTS_PER_SLICE", 2)
    source = make_batch_spec(SPEC, (START, START), tmp_path).sources["one"]
    store = LocalStore(tmp_path / "store")
    for n in range(5):
        store.put(f"inbox/{n}.parquet", b"none")
    part = ObjectSource("one", source, store).plan(Member("one"), None, source.limits)
    assert (len(part.dead), part.pending) == (5, False)


def test_the_batch_run_has_a_name_of_its_own() -> None:
    """Another range is another pipeline, and nothing of it reaches the outside."""
    outside = {
        "sinks": {"copy": {"kind": "files", "path": "out"}},
        "outputs": {"namespace": "shared", "catalog": "sqlite:////x"},
    }
    spec = SPEC.model_validate({**SPEC.model_dump(mode="json", by_alias=True), **outside})
    batch, other = (
        make_batch_spec(spec, (START, START + timedelta(days=days)), Path("/tmp/x"))
        for days in (1, 2)
    )
    assert (batch.sinks, batch.outputs.namespace, batch.outputs.catalog) == (
        {},
        None,
        "sqlite:////tmp/x/catalog.sqlite",
    )
    assert batch.name.startswith("p__bf_")
    assert batch.name != other.name
    assert batch.windows == SPEC.windows


@pytest.mark.e2e
def test_what_the_stream_had_to_leave_out_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows differ where rows came too late for the stream, and nowhere else.

    Once those are merged they are equal.
    """

    @contextmanager
    def start_reference(
        run: RunContext, view: InputView, *_: object
    ) -> Iterator[Callable[[], Mover]]:
        yield lambda: OracleMover(view, run.spec)

    monkeypatch.setattr(pipeline_run, "_start_mover", start_reference)
    steady = Steady(tmp_path, 6)
    assert run_pipeline(steady.spec, RunOptions(store_url=steady.store_url)) == 0
    assert steady.table("late").num_rows > 0
    app = typer.Typer()
    app.command()(backfill.run_backfill)
    bounds = ["--start", "2026-03-01T00:00:00Z", "--end", "2026-03-02T00:00:00Z"]
    done = CliRunner().invoke(app, [str(steady.spec_file), "--store", steady.store_url, *bounds])
    assert done.exit_code == 0, done.output
    found = json.loads(steady.store().get(done.stdout.splitlines()[-1]).data)["windows"][
        "per_minute"
    ]
    assert found["different"] > 0
    assert found["equal"] > 0
    assert found["only_stream"] == 0
    for shown in found["examples"]["different"]:
        assert int(shown["batch"]["n"]) > int(shown["stream"]["n"])
    assert [entry.key for entry in steady.store().list_objects("steady__bf_")] == []
    late = [
        "--output",
        "per_minute",
        "--since",
        bounds[1],
        "--until",
        bounds[3],
        "--store",
        steady.store_url,
        "--json",
    ]
    asked = CliRunner().invoke(tidegate, ["splice", "late", str(steady.spec_file), *late])
    request = json.loads(asked.stdout)["data"]["request"]
    merge = [
        "splice",
        "merge",
        str(steady.spec_file),
        request,
        "--yes",
        "--store",
        steady.store_url,
    ]
    assert CliRunner().invoke(tidegate, merge).exit_code == 0
    again = CliRunner().invoke(app, [str(steady.spec_file), "--store", steady.store_url, *bounds])
    assert again.exit_code == 0, again.output
    assert json.loads(steady.store().get(again.stdout.splitlines()[-1]).data)["equal"] is True


def test_a_range_without_an_offset_is_refused(tmp_path: Path) -> None:
    """The user's mistake in one sentence, and the exit code of a configuration error."""
    steady = Steady(tmp_path, 1)
    app = typer.Typer()
    app.command()(backfill.run_backfill)
    done = CliRunner().invoke(
        app,
        [str(steady.spec_file), "--store", steady.store_url, "--start", "2026-03-01", "--end", "x"],
    )
    assert done.exit_code == 2
    assert "is not an instant with an offset from UTC" in done.output
