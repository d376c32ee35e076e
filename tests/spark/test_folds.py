"""Reducers in Spark tasks.

Whatever the rows, the keys and the states, the result is that of the driver's fold.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.streams import folds
from tests.streams.support import World, streams_spec
from tidegate.jobs.streams.reducers import Reducer, fold_batch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidegate.jobs.spark.reducer_tasks import SparkReducerRunner

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark_folds(
    session: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> SparkReducerRunner:
    from tidegate.jobs.spark.reducer_tasks import SparkReducerRunner
    from tidegate.jobs.spark.spark_session import SparkSessions

    return SparkReducerRunner(
        SparkSessions(lambda: session), tmp_path_factory.mktemp("folds"), least=1, groups=3
    )


@pytest.fixture(autouse=True)
def _nothing_broken() -> Iterator[None]:
    yield
    folds.broken.clear()


def table(rows: list[tuple[Any, Any, int]], start: int = 0) -> Any:
    """Rows of a stream with key columns k and x, and v."""
    return pa.table(
        {
            "k": pa.array([k for k, _, _ in rows], pa.string()),
            "x": pa.array([x for _, x, _ in rows], pa.float64()),
            "v": pa.array([v for _, _, v in rows], pa.int64()),
            "position": pa.array(range(start, start + len(rows)), pa.int64()),
            "stream_time": pa.array([p * 10 for p in range(len(rows))], pa.int64()),
            "_id": [f"a/0/{start + p}" for p in range(len(rows))],
        }
    )


def keyed(name: str, *keys: str, **more: Any) -> Reducer:
    """A reducer of `tests.streams.folds` over keys."""
    return Reducer(f"tests.streams.folds:{name}", keys, 0, {"d": {"v": "long"}}, **more)


REDUCERS = [
    keyed("totals", "k"),
    keyed("running", "k", "x", recheck=3),
    keyed("picky", "x", recheck=2),
    keyed("misfit", "k"),
    Reducer(
        None,
        ("k",),
        None,
        {"d": {"k": "string", "n": "long", "s": "long"}},
        2,
        {"n": ("count", "x"), "s": ("sum", "v")},
    ),
    Reducer(
        None, ("k",), None, {"d": {"k": "string", "s": "long"}}, 0, {"s": ("sum", "10 // (v - 13)")}
    ),
    Reducer("tests.streams.folds:split", ("k",), 0, {"even": {"v": "long"}, "odd": {"v": "long"}}),
]
rows = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", None, "é"]),
        st.sampled_from([0.0, -0.0, 1.5, None]),
        st.integers(0, 13),
    ),
    min_size=1,
    max_size=25,
)


@settings(
    max_examples=4,  # some seconds each: two jobs, and more where a row fails
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.generate],
)
@given(first=rows, second=rows, which=st.sampled_from(REDUCERS))
def test_tasks_fold_as_the_driver_does(
    spark_folds: SparkReducerRunner, first: Any, second: Any, which: Reducer
) -> None:
    """Two batches, the second from the states of the first.

    Dispatches, states and the row at which it stops are the same.
    """
    expected = fold_batch(which, table(first), {})
    found = spark_folds(which, table(first), {})
    assert found == expected
    states = expected.states
    assert spark_folds(which, table(second, len(first)), states) == fold_batch(
        which, table(second, len(first)), states
    )


def test_a_reducer_in_tasks_stops_at_the_least_row_and_goes_on_there(
    spark_folds: SparkReducerRunner, tmp_path: Path
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
    world = World(spec, run=spark_folds)
    world.epoch((1, 1), (2, 1), (3, 13), (4, 2), (5, 13))
    state = world.state().attachments["r"]
    assert (state.status, state.failure and state.failure["position"], world.values("d")) == (
        "paused",
        2,
        [0, 1],
    )
    assert state.failure is not None
    assert state.failure["error"] == "ValueError: not a 13"
    mended = {
        **spec.reducers["r"].model_dump(by_alias=True),
        "function": "tests.streams.folds:totals",
    }
    world.driver(
        spec=streams_spec(streams={"d": {"schema": {"v": "long"}}}, reducers={"r": mended})
    )
    world.epoch((6, 1), ask=(("resume", "r"),))
    model = World(world.bench.spec)
    model.epoch((1, 1), (2, 1), (3, 13), (4, 2), (5, 13), (6, 1))
    assert [r["_id"] for r in world.rows("d")] == [r["_id"] for r in model.rows("d")]
    assert world.state().attachments["r"].cursor == 6


def test_a_group_without_a_result_is_missed(tmp_path: Path) -> None:
    """A disk that several hosts share may list a file late."""
    from tidegate.jobs.spark.reducer_tasks import _merge_group_results

    for group in range(2):
        (tmp_path / f"rows-{group}").touch()
    totals = keyed("totals", "k")
    folded = fold_batch(totals, table([("a", 1.5, 1)]), {})
    (tmp_path / "folded-0").write_bytes(pickle.dumps(folded))
    with pytest.raises(FileNotFoundError, match="folded-1"):
        _merge_group_results(totals, tmp_path)


def test_tasks_refuse_side_effects_and_chance(spark_folds: SparkReducerRunner) -> None:
    """What pauses a reducer in the driver pauses it in a task, in the same words."""
    for name, error in (
        ("writing", "SideEffectError: open"),
        ("calling", "SideEffectError: socket"),
        ("forgetful", "not JSON"),
    ):
        failure = spark_folds(keyed(name, "k"), table([("a", 0.0, 1), ("b", 0.0, 2)]), {}).failure
        assert failure is not None
        assert error in failure.error, name
    failure = spark_folds(
        keyed("dicing", "k", recheck=2), table([("a", 0.0, 1), ("a", 0.0, 2)]), {}
    ).failure
    assert failure is not None
    assert "not deterministic" in failure.error


def test_what_is_not_worth_a_job_stays_in_the_driver(session: SparkSession, tmp_path: Path) -> None:
    """Reducers without keys are one sequence, and few rows cost less than starting a task.

    No job runs for them.
    """
    from tidegate.jobs.spark.reducer_tasks import MIN_JOB_ROWS, SparkReducerRunner
    from tidegate.jobs.spark.spark_session import SparkSessions

    chosen = SparkReducerRunner(SparkSessions(lambda: session), tmp_path / "nowhere")
    few = table([("a", 0.0, 1)] * 10)
    assert chosen(keyed("totals", "k"), few, {}) == fold_batch(keyed("totals", "k"), few, {})
    many = table([("a", 0.0, 1)] * MIN_JOB_ROWS)
    assert chosen(keyed("totals"), many, {}).failure is None
    with pytest.raises(FileNotFoundError):
        chosen(keyed("totals", "k"), many, {})
