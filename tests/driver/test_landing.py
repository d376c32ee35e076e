"""The landing log: each batch once, each generation one checkpoint folder."""

from __future__ import annotations

import io
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from pydantic import ValidationError

from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest
from tidegate.errors import (
    ConfigurationError,
    FencedError,
    PoisonError,
    TidegateError,
    TransientError,
)
from tidegate.jobs.driver.landing_log import (
    LandingLog,
    bound_batch_size,
    classify_query_failure,
    read_landing_status,
    run_landing_query,
)
from tidegate.jobs.driver.otel_metrics import LandingMetrics
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits, SourceSpec
from tidegate.jobs.spec.source_options import LandingOptions

RATE = {"format": "rate", "columns": {"at": "timestamp", "n": "value"}}


def spec(**more: object) -> SourceSpec:
    """A landed source."""
    raw = {
        "path": "inbox/a",
        "schema": {"at": "timestamp", "n": "long"},
        "event_time": "at",
        "lag": "1s",
        "landing": RATE,
    }
    return SourceSpec.model_validate(raw | more)


def keys(store: MemoryStore) -> list[str]:
    """The landed objects."""
    return [e.key.rpartition("/")[2] for e in store.list_objects("inbox/a/") if "/_" not in e.key]


def test_batch_lands_once(tmp_path: Path) -> None:
    """A batch that Spark runs again finds its object, whose bytes stay those of the first time."""
    store = MemoryStore()
    landing = LandingLog("a", spec(), store, tmp_path)
    assert landing.land_batch(0, b"first", 1)
    assert not LandingLog("a", spec(), store, tmp_path).land_batch(0, b"again", 1)
    assert landing.land_batch(3, b"later", 1)
    assert keys(store) == ["0001-000000000000.parquet", "0001-000000000003.parquet"]
    assert store.get("inbox/a/0001-000000000000.parquet").data == b"first"


def test_lost_checkpoint_is_refused(tmp_path: Path) -> None:
    """Another checkpoint folder must not take the log over unasked.

    Asked, it goes on behind, in a generation of its own.
    """
    store = MemoryStore()
    LandingLog("a", spec(), store, tmp_path / "one").land_batch(7, b"x", 1)
    with pytest.raises(ConfigurationError, match="another checkpoint folder"):
        LandingLog("a", spec(), store, tmp_path / "two")
    LandingLog("a", spec(), store, tmp_path / "two", new_generation=True).land_batch(0, b"y", 1)
    assert keys(store) == ["0001-000000000007.parquet", "0002-000000000000.parquet"]
    with pytest.raises(ConfigurationError, match="another checkpoint folder"):
        LandingLog("a", spec(), store, tmp_path / "one")


def test_one_process_per_folder(tmp_path: Path) -> None:
    """A second process on the same folder is refused while the first one lives."""
    landing = LandingLog("a", spec(), MemoryStore(), tmp_path)
    with (
        landing.lock_folder(),
        pytest.raises(ConfigurationError, match="another process"),
        landing.lock_folder(),
    ):
        pass
    with landing.lock_folder():
        pass


def test_a_full_address_is_where_the_pipeline_reads(tmp_path: Path) -> None:
    """A source at an address of its own is landed there, and its pipeline finds what was landed."""
    store, elsewhere = MemoryStore(), tmp_path / "elsewhere"
    source = spec(path=elsewhere.as_uri())
    sink = io.BytesIO()
    pq.write_table(pa.table({"at": pa.array([0], pa.timestamp("us", "UTC")), "n": [1]}), sink)
    LandingLog("a", source, store, tmp_path / "checkpoint").land_batch(0, sink.getvalue(), 1)
    assert list(store.list_objects("")) == []
    pipeline = PipelineSpec.model_validate({"name": "p", "sources": {"a": source}})
    reader = ObjectSource("a", source, InputView(store, pipeline, tmp_path / "scratch"))
    assert [part["rows"] for part in reader.plan(Member("a"), None, ReadLimits()).parts] == [1]


def noted(folder: Path, batch: int, offsets: str) -> None:
    """Spark writes down what a batch is to hold."""
    (folder / "spark" / "offsets").mkdir(parents=True, exist_ok=True)
    (folder / "spark" / "offsets" / str(batch)).write_text(offsets)


def test_the_newest_batch_comes_again_as_it_was(tmp_path: Path) -> None:
    """Noted offsets are those of the first time.

    It is the same batch, whether its object was written before the end or not.
    """
    store = MemoryStore()
    noted(tmp_path, 4, "10 to 20")
    LandingLog("a", spec(), store, tmp_path)._note_batch(4)  # and the process dies
    assert LandingLog("a", spec(), store, tmp_path).land_batch(4, b"x", 1)
    assert not LandingLog("a", spec(), store, tmp_path).land_batch(4, b"x", 1)


@pytest.mark.parametrize(("batch", "offsets"), [(4, "10 to 30"), (3, "5 to 20"), (3, "5 to 10")])
def test_a_folder_that_went_back_is_refused(tmp_path: Path, batch: int, offsets: str) -> None:
    """From a backup, or without its newest files, Spark numbers other rows like landed ones.

    They are not dropped as landed.
    """
    store = MemoryStore()
    for number, what in ((3, "5 to 10"), (4, "10 to 20")):
        noted(tmp_path, number, what)
        LandingLog("a", spec(), store, tmp_path).land_batch(number, b"x", 1)
    noted(tmp_path, batch, offsets)
    with pytest.raises(ConfigurationError, match="went back"):
        LandingLog("a", spec(), store, tmp_path).land_batch(batch, b"y", 1)
    assert len(keys(store)) == 2


@pytest.mark.parametrize(
    "begun", [False, True], ids=["between two batches", "in the middle of one"]
)
def test_nothing_is_written_behind_a_new_generation(tmp_path: Path, begun: bool) -> None:
    """A process that was taken for dead writes no object whose key sorts before what may have been
    read.
    """
    store = MemoryStore()
    old = LandingLog("a", spec(), store, tmp_path / "old")
    old.land_batch(0, b"x", 1)
    if begun:
        old._note_batch(1)
    LandingLog("a", spec(), store, tmp_path / "new", new_generation=True).land_batch(0, b"y", 1)
    before = {key: store.get(f"inbox/a/{key}").data for key in keys(store)}
    if begun:
        assert not old.land_batch(1, b"z", 1)
        assert pq.read_table(io.BytesIO(before["0001-000000000001.parquet"])).num_rows == 0
    with pytest.raises(FencedError, match="another process began a generation"):
        old.land_batch(2, b"z", 1)
    assert {key: store.get(f"inbox/a/{key}").data for key in keys(store)} == before


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.NO_EFFECT, Fault.LATE])
def test_a_lost_answer_is_no_fence(tmp_path: Path, fault: Fault) -> None:
    """A note or an object whose write is not known to have happened is read back.

    The batch is there, once.
    """
    bucket, asked = MemoryBucket(), Counter[str]()
    LandingLog("a", spec(), MemoryStore(bucket), tmp_path)

    def once(request: StoreRequest) -> Fault | None:
        asked[request.verb] += 1
        return fault if request.verb in ("swap", "create") and asked[request.verb] == 1 else None

    landing = LandingLog("a", spec(), MemoryStore(bucket, hook=once), tmp_path)
    landing.land_batch(0, b"x", 1)
    while bucket.held:
        bucket.deliver_held()
    assert landing.land_batch(1, b"y", 1)
    assert [bucket.objects[f"inbox/a/{key}"] for key in keys(MemoryStore(bucket))] == [b"x", b"y"]


@pytest.mark.parametrize(
    ("landing", "bound"),
    [
        ({"format": "kafka"}, {"maxOffsetsPerTrigger": "200000"}),
        (
            {"format": "kafka", "options": {"maxoffsetspertrigger": "7"}},
            {"maxoffsetspertrigger": "7"},
        ),
        ({"format": "json"}, {"maxFilesPerTrigger": "100"}),
        ({"format": "rate"}, {}),
    ],
)
def test_a_batch_is_bounded(landing: dict[str, Any], bound: dict[str, str]) -> None:
    """The first batch of a topic or a folder is not all there is.

    It passes through the driver's memory.
    """
    assert bound_batch_size(LandingOptions.model_validate(landing)) == bound


@pytest.mark.parametrize(
    ("said", "error", "code"),
    [
        (
            "Python: Traceback\n[CAST_INVALID_INPUT] 'x' is no BIGINT. SQLSTATE: 22018",
            PoisonError,
            "landing.bad_value",
        ),
        ("connection refused", TransientError, "landing.failed"),
    ],
)
def test_whose_failure_it_is(
    tmp_path: Path, said: str, error: type[TidegateError], code: str
) -> None:
    """A value that an expression cannot take fails every time.

    What Spark says of the world may pass; our own words stay.
    """
    landing = LandingLog("a", spec(), MemoryStore(), tmp_path)
    found = classify_query_failure(landing, RuntimeError(said))
    assert (type(found), found.code) == (error, code)
    landing.failure = ConfigurationError("ours", code="x")
    assert classify_query_failure(landing, RuntimeError(said)) is landing.failure


def test_the_process_leaves_word(tmp_path: Path) -> None:
    """What it landed last and when, which process it is, and how it ended."""
    store = MemoryStore()
    landing = LandingLog("a", spec(), store, tmp_path)
    assert read_landing_status("a", spec(), store) is None
    landing.land_batch(3, b"x", 5)
    landing.report_status("failed", "no more")
    found = read_landing_status("a", spec(), store)
    assert found is not None
    assert [found[k] for k in ("state", "why", "batch", "rows", "landed", "pid")] == [
        "failed",
        "no more",
        3,
        5,
        5,
        os.getpid(),
    ]


@pytest.mark.parametrize(
    "fields",
    [{"landing": {**RATE, "columns": {"x": "1"}}}, {"format": "json"}, {"partition_by": "folder"}],
    ids=["unknown column", "another format", "folders"],
)
def test_specs_that_are_refused(fields: dict[str, object]) -> None:
    """What landing cannot write is said when the spec is read."""
    with pytest.raises(ValidationError, match="landing"):
        spec(**fields)


def test_a_socket_never_goes_on_at_an_old_checkpoint(tmp_path: Path) -> None:
    """A socket numbers its lines again for each process.

    So generation and checkpoint are new, and no line is taken as read.
    """
    store = MemoryStore()
    socket = spec(landing={"format": "socket", "columns": {"at": "timestamp", "n": "value"}})
    first = LandingLog("a", socket, store, tmp_path)
    first.land_batch(0, b"x", 1)
    second = LandingLog("a", socket, store, tmp_path)
    assert second.land_batch(0, b"y", 1)
    assert first.spark_folder != second.spark_folder
    assert keys(store) == ["0001-000000000000.parquet", "0002-000000000000.parquet"]


class Query:
    """A query that finishes some batches and fails, or is idle."""

    def __init__(self, landing: LandingLog, batches: int, failure: str | None) -> None:
        (landing.spark_folder / "commits").mkdir(parents=True, exist_ok=True)
        for _ in range(batches):
            landing.land_batch(landing.newest_committed_batch() + 1, b"x", 2)
            (landing.spark_folder / "commits" / str(landing.newest_committed_batch() + 1)).touch()
        self.isActive, self._failure = failure is None, failure
        self.stopped = 0

    def exception(self) -> Exception | None:
        """Why it failed."""
        return None if self._failure is None else RuntimeError(self._failure)

    def stop(self) -> None:
        """Count."""
        self.stopped += 1


@pytest.mark.parametrize(
    ("runs", "end"),
    [
        ([(1, "no newest offsets"), (0, None)], None),
        ([(1, "first"), (1, "second"), (0, "third")], "third"),
        ([(0, "at once")], "at once"),
    ],
    ids=["goes on", "until it stands", "not at all"],
)
def test_a_query_that_got_on_is_started_again(
    tmp_path: Path, runs: list[tuple[int, str | None]], end: str | None
) -> None:
    """A failure after a finished batch is not the end (Spark 4.1 fails so after a crash).

    One without progress is.
    """
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    metrics = LandingMetrics(provider.get_meter("t"), "p", "a")
    landing = LandingLog("a", spec(), MemoryStore(), tmp_path, metrics=metrics)
    queries: list[Query] = []

    def start() -> Any:
        queries.append(Query(landing, *runs[len(queries)]))
        return queries[-1]

    failed = run_landing_query(start, landing, threading.Event(), until_idle=0.5)
    said = None if failed is None else failed.message
    assert (len(queries), said) == (
        len(runs),
        None if end is None else f"the landing query of a failed: {end}",
    )
    assert [query.stopped for query in queries] == [1] * len(runs)
    data = reader.get_metrics_data()
    assert data is not None
    told = {
        m.name: m.data.data_points[0].value  # type: ignore[union-attr]
        for m in data.resource_metrics[0].scope_metrics[0].metrics
    }
    batches = sum(finished for finished, _ in runs)
    assert told.get("tidegate.landing.restarts", 0) == len(runs) - 1
    assert (told.get("tidegate.landing.batches", 0), told.get("tidegate.landing.rows", 0)) == (
        batches,
        2 * batches,
    )
    provider.shutdown()
