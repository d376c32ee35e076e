"""Streams in Spark's tasks.

Whatever the rows, the keys and the states, the result is that of the dispatcher in one process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pytest
import structlog.testing
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.engine.harness import SECOND, Bench, spec_of
from tests.streams.support import World, streams_spec
from tidegate.checkpoints.local_store import LocalStore
from tidegate.errors import ConfigurationError, TidegateError
from tidegate.jobs.rows.stored_partials import encode_table, store_table
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.streams.dispatcher import DispatchRunner, make_local_runner
from tidegate.jobs.streams.reducers import Reducer
from tidegate.jobs.streams.row_history import LogHistory
from tidegate.jobs.streams.stream_state import read_reducer_states

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

MakeRunner = Callable[[Bench, LogHistory], DispatchRunner]
_NAMES = count()


@pytest.fixture
def in_tasks(session: SparkSession) -> MakeRunner:
    """Makes runners whose every batch with keys is folded by three groups."""
    from tidegate.jobs.spark.stream_tasks import TaskDispatcher

    def make(bench: Bench, history: LogHistory) -> DispatchRunner:
        here = make_local_runner(bench.store, history)
        return TaskDispatcher(session, bench.spec, bench.store, history, here, 1, 3)

    return make


def keyed_spec(**graph: Any) -> PipelineSpec:
    """One source with key columns k and x, and v, released as it comes."""
    source = {
        "path": "inbox/x/",
        "schema": {"t": "timestamp", "k": "string", "x": "double", "v": "long"},
        "event_time": "t",
        "lag": "0",
    }
    return spec_of(sources={"a": source}, windows={}, release={"mode": "pass_through"}, **graph)


def fold_spec(function: str, *keys: str, **more: Any) -> PipelineSpec:
    """A reducer of `tests.streams.folds` over keys, behind a pipe and before one."""
    return keyed_spec(
        streams={"some": {}, "d": {"schema": {"v": "long"}}, "again": {"schema": {"v": "long"}}},
        pipes={
            "p": {"from": "events", "to": "some", "where": "v <> 7"},
            "q": {"from": "d", "to": "again"},
        },
        reducers={
            "r": {
                "from": "some",
                "to": "d",
                "function": f"tests.streams.folds:{function}",
                "initial": 0,
                "keys": keys,
                **more,
            }
        },
    )


def sum_spec(expression: str) -> PipelineSpec:
    """A reducer with aggregates."""
    columns = {"k": "string", "n": "long", "s": "long"}
    return keyed_spec(
        streams={"d": {"schema": columns}},
        reducers={
            "r": {
                "from": "events",
                "to": "d",
                "keys": ("k",),
                "aggregates": {"n": "count(x)", "s": f"sum({expression})"},
            }
        },
    )


SPECS = [
    fold_spec("totals", "k"),
    fold_spec("running", "k", "x", recheck=3),
    fold_spec("picky", "x", recheck=2),
    fold_spec("misfit", "k"),
    sum_spec("v"),
    sum_spec("10 // (v - 13)"),
    keyed_spec(
        streams={"even": {"schema": {"v": "long"}}, "odd": {"schema": {"v": "long"}}},
        reducers={
            "r": {
                "from": "events",
                "to": ("even", "odd"),
                "function": "tests.streams.folds:split",
                "keys": ("k",),
            }
        },
    ),
]
rows = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", None, "é"]),
        st.sampled_from([0.0, -0.0, float("nan"), 1.5, None]),
        st.integers(0, 13),
    ),
    min_size=1,
    max_size=25,
)
Rows = list[tuple[str | None, float | None, int]]


def play(world: World, batches: list[Rows]) -> list[Any]:
    """Run an epoch for each batch; tables, states of streams, and states of reducers."""
    for batch in batches:
        for k, x, v in batch:
            world.bench.sources["a"].append({"t": v * SECOND, "k": k, "x": x, "v": v})
        world.epoch()
    bench = world.bench
    names = [*bench.spec.streams, "rejections"]
    tables = [
        [
            {name: row.get(name) for name in build_table_schema(bench.spec, table).names}
            for row in world.rows(table)
        ]
        for table in names
    ]
    segments = [ref for ref in world.head().segments if ref.kind.startswith("reducer:")]
    states = read_reducer_states(bench.store, segments)
    return [repr(tables), world.head().notes["streams"], states]


@settings(
    max_examples=4,  # some seconds each: an epoch has four jobs, and more where a row fails
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.generate],
)
@given(first=rows, second=rows, spec=st.sampled_from(SPECS))
def test_tasks_dispatch_as_one_process_does(
    in_tasks: MakeRunner, tmp_path: Path, first: Rows, second: Rows, spec: PipelineSpec
) -> None:
    """Two epochs, the second from the states of the first.

    Rows of all streams, states, and the row at which a reducer stops are the same.
    """
    folder = tmp_path / f"{next(_NAMES)}"
    found = play(World(spec, LocalStore(folder), in_tasks), [first, second])
    assert found == play(World(spec), [first, second])


def test_a_backfill_in_tasks_reads_earlier_epochs(in_tasks: MakeRunner, tmp_path: Path) -> None:
    """Rows of streams and of events, a few each epoch."""
    spec = keyed_spec(
        streams={"some": {}, "copied": {}, "recopied": {}},
        pipes={
            "p": {"from": "events", "to": "some", "where": "v <> 7"},
            "q": {"from": "some", "to": "copied", "attach": "on_request", "rows_per_epoch": 2},
            "r": {"from": "events", "to": "recopied", "attach": "on_request", "rows_per_epoch": 3},
        },
    )
    worlds = [World(spec), World(spec, LocalStore(tmp_path), in_tasks)]
    for world in worlds:
        play(world, [[("a", 1.0, v) for v in batch] for batch in ((1, 2, 7), (5,), (4, 6))])
        world.epoch(ask=(("attach", "q"), ("attach", "r")))
        for _ in range(3):
            world.epoch()
    expected, found = (play(world, [[("b", 2.0, 9)]]) for world in worlds)
    assert found == expected
    assert [row["v"] for row in worlds[1].rows("copied")] == [1, 2, 5, 4, 6, 9]
    assert [row["v"] for row in worlds[1].rows("recopied")] == [1, 2, 7, 5, 4, 6, 9]


def test_a_reducer_in_tasks_stops_at_the_least_row_and_goes_on_there(
    in_tasks: MakeRunner, tmp_path: Path
) -> None:
    """Two keys fail in one batch.

    The earlier row is named, rows of other keys behind it wait as well; then all go on, once.
    """
    spec = streams_spec(
        streams={"d": {"schema": {"v": "long"}}},
        reducers={
            "r": {
                "from": "events",
                "to": "d",
                "function": "tests.streams.folds:picky",
                "initial": 0,
                "keys": ["v"],
            }
        },
    )
    world = World(spec, LocalStore(tmp_path), in_tasks)
    world.epoch((1, 1), (2, 1), (3, 13), (4, 2), (5, 13))
    state = world.state().attachments["r"]
    assert (state.status, state.failure and state.failure["position"], world.values("d")) == (
        "paused",
        2,
        [0, 1],
    )
    assert state.failure is not None
    assert state.failure["error"] == "ValueError: not a 13"
    repaired = {
        **spec.reducers["r"].model_dump(by_alias=True),
        "function": "tests.streams.folds:totals",
    }
    world.driver(
        spec=streams_spec(streams={"d": {"schema": {"v": "long"}}}, reducers={"r": repaired})
    )
    world.epoch((6, 1), ask=(("resume", "r"),))
    model = World(world.bench.spec)
    model.epoch((1, 1), (2, 1), (3, 13), (4, 2), (5, 13), (6, 1))
    assert [r["_id"] for r in world.rows("d")] == [r["_id"] for r in model.rows("d")]
    assert world.state().attachments["r"].cursor == 6


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("writing", "SideEffectError: open"),
        ("calling", "SideEffectError: socket"),
        ("forgetful", "not JSON"),
        ("dicing", "not deterministic"),
    ],
)
def test_tasks_refuse_side_effects_and_chance(
    in_tasks: MakeRunner, tmp_path: Path, function: str, error: str
) -> None:
    """What pauses a reducer in one process pauses it in a task, in the same words."""
    world = World(fold_spec(function, "k", recheck=2), LocalStore(tmp_path), in_tasks)
    play(world, [[("a", 0.0, 1), ("a", 0.0, 2)]])
    failure = world.state().attachments["r"].failure
    assert failure is not None
    assert error in failure["error"]


def test_an_epoch_without_rows_needs_no_task(in_tasks: MakeRunner, tmp_path: Path) -> None:
    """Its reducers and pipes have nothing to take."""
    spec = fold_spec("totals", "k")
    world = World(spec, LocalStore(tmp_path), in_tasks)
    play(world, [[("a", 0.0, 1)]])
    with structlog.testing.capture_logs() as logged:
        world.epoch()
        play(world, [[("a", 0.0, 2)]])
    jobs = [one["job"] for one in logged if one["event"] == "tasks_finished"]
    assert jobs == ["streams", "fold", "streams"]


def test_small_batches_and_reducers_without_keys_are_folded_by_one_task(
    session: SparkSession, tmp_path: Path
) -> None:
    """Without keys it is one sequence."""
    from tidegate.jobs.spark.stream_tasks import TaskDispatcher

    def make(least: int, bench: Bench, history: LogHistory) -> DispatchRunner:
        here = make_local_runner(bench.store, history)
        return TaskDispatcher(session, bench.spec, bench.store, history, here, least, 3)

    jobs = []
    for least, keys in ((3, ["k"]), (2, ["k"]), (1, [])):
        store = LocalStore(tmp_path / uuid4().hex)
        world = World(fold_spec("totals", *keys), store, partial(make, least))
        with structlog.testing.capture_logs() as logged:
            play(world, [[("a", 0.0, 1), ("b", 0.0, 2)]])
        jobs.append([one["job"] for one in logged if one["event"] == "tasks_finished"])
    assert jobs == [["streams"], ["streams", "fold", "streams"], ["streams"]]


MODULE = """\
from pathlib import Path

FACTOR = int((Path(__file__).parent / "factor.txt").read_text())


def multiply(state, event, index):
    return state, [{"v": event["v"] * FACTOR}]
"""


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineSpec:
    """A reducer in a module of its own, with data beside it."""
    name = f"rates_{uuid4().hex[:8]}"
    folder.mkdir()
    (folder / f"{name}.py").write_text(MODULE)
    (folder / "factor.txt").write_text("2")
    monkeypatch.syspath_prepend(str(folder))
    importlib.import_module(name)
    return keyed_spec(
        streams={"d": {"schema": {"v": "long"}}},
        reducers={"r": {"from": "events", "to": "d", "function": f"{name}:multiply"}},
    )


def test_tasks_run_the_code_that_the_driver_has_imported(
    in_tasks: MakeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changes meanwhile counts from the next start on."""
    spec = write_module(tmp_path / "code", monkeypatch)
    world = World(spec, LocalStore(tmp_path / "store"), in_tasks)
    [module] = (tmp_path / "code").glob("*.py")
    module.write_text("raise ImportError('half written')")
    play(world, [[("a", 0.0, 3)]])
    assert world.values("d") == [6]


def test_a_reducer_that_tasks_cannot_import_ends_the_start(
    in_tasks: MakeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the module reads a file that is on the driver's host only."""
    spec = write_module(tmp_path / "code", monkeypatch)
    (tmp_path / "code" / "factor.txt").unlink()
    with pytest.raises(
        ConfigurationError, match=r"cannot import the reducer .*factor\.txt"
    ) as failed:
        World(spec, LocalStore(tmp_path / "store"), in_tasks)
    assert failed.value.code == "spark.reducer_not_on_hosts"


def test_groups_that_come_to_other_rows_pause_the_reducer(
    in_tasks: MakeRunner, tmp_path: Path
) -> None:
    """Otherwise rows would be lost between the groups, and others be in two."""
    spec = keyed_spec(
        streams={"some": {}, "d": {"schema": {"v": "long"}}},
        pipes={"p": {"from": "events", "to": "some", "where": "random() < 0.5"}},
        reducers={
            "r": {
                "from": "some",
                "to": "d",
                "function": "tests.streams.folds:totals",
                "initial": 0,
                "keys": ("k",),
            }
        },
    )
    world = World(spec, LocalStore(tmp_path), in_tasks)
    play(world, [[("a", 0.0, 1)] * 100])
    state = world.state().attachments["r"]
    assert (state.status, state.cursor, world.values("d")) == ("paused", 0, [])
    assert state.failure is not None
    assert "came out differently in another task" in state.failure["error"]


def test_groups_without_rows_pause_the_reducer_before(in_tasks: MakeRunner, tmp_path: Path) -> None:
    """Where a reducer comes to other rows, the one behind it has nothing to fold in its groups."""
    totals = {"function": "tests.streams.folds:totals", "initial": 0}
    spec = keyed_spec(
        streams={
            "some": {},
            "mid": {"schema": {"v": "long"}},
            "d": {"schema": {"v": "long"}},
        },
        pipes={"p": {"from": "events", "to": "some", "where": "random() < 0.5"}},
        reducers={
            "all": {**totals, "from": "some", "to": "mid"},
            "each": {**totals, "from": "mid", "to": "d", "keys": ("v",)},
        },
    )
    world = World(spec, LocalStore(tmp_path), in_tasks)
    play(world, [[("a", 0.0, 1)] * 100])
    states = world.state().attachments
    assert (states["all"].status, states["each"].cursor, world.values("d")) == ("paused", 0, [])


def test_a_reducer_behind_another_is_folded_once_for_all_groups(
    in_tasks: MakeRunner, tmp_path: Path
) -> None:
    """What reducers before a large batch gave is kept for its groups, states included."""
    spec = keyed_spec(
        streams={"mid": {"schema": {"v": "long"}}, "d": {"schema": {"v": "long"}}},
        reducers={
            "all": {
                "from": "events",
                "to": "mid",
                "function": "tests.streams.folds:totals",
                "initial": 0,
            },
            "each": {
                "from": "mid",
                "to": "d",
                "function": "tests.streams.folds:totals",
                "initial": 0,
                "keys": ("v",),
            },
        },
    )
    batches: list[Rows] = [[("a", 0.0, v) for v in (1, 2, 3)], [("b", 1.0, v) for v in (4, 5)]]
    found = play(World(spec, LocalStore(tmp_path), in_tasks), batches)
    assert found == play(World(spec), batches)


def test_a_failed_job_leaves_no_tables_of_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group has stored what it folded before another one lost its executor."""
    from tidegate.jobs.spark import stream_tasks
    from tidegate.jobs.spark.errors import STREAMS_FAILED

    store, stored = LocalStore(tmp_path), list[str]()

    def lose_executor(_: Any, job: str, orders: list[Any]) -> list[Any]:
        if job == "streams":
            return [stream_tasks._StreamAnswer(large=("r", 9))]
        table = encode_table(pa.table({"k": ["a"]}))
        stored.append(store_table(store, orders[0].work.folders, "fold-r", 0, table).key)
        raise STREAMS_FAILED(pipeline="p", cause="an executor is gone")

    def make(bench: Bench, history: LogHistory) -> DispatchRunner:
        here = make_local_runner(bench.store, history)
        session: Any = None  # no job of Spark is run
        return stream_tasks.TaskDispatcher(session, bench.spec, bench.store, history, here, 1, 3)

    monkeypatch.setattr(stream_tasks.TaskDispatcher, "_run_job", lose_executor)
    monkeypatch.setattr(stream_tasks, "count_tasks", lambda _: 3)
    with pytest.raises(TidegateError, match="an executor is gone"):
        play(World(sum_spec("v"), store, make), [[("a", 0.0, 1)]])
    assert [store.stat(key) for key in stored] == [None]


def test_keys_that_a_fold_takes_for_one_are_in_one_group() -> None:
    """Zeros are equal; each NaN differs from itself, but has the text of the others."""
    from tidegate.jobs.spark.stream_tasks import assign_key_numbers

    table = pa.table(
        {"x": [0.0, float("nan"), -0.0, 1.5, None, -float("nan"), None], "k": list("aaaaaab")}
    )
    reducer = Reducer("tests.streams.folds:totals", ("x", "k"), 0, {"d": {"v": "long"}})
    numbers = assign_key_numbers(table, reducer)
    assert numbers[0] == numbers[2]
    assert numbers[1] == numbers[5]
    assert len(np.unique(numbers)) == 5
