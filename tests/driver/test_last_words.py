"""The end of a driver whose collector does not answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from tenacity import Retrying, stop_after_attempt

from tests.driver.sealed_epochs import FACTS, sealed
from tests.engine.harness import Bench, row, spec_of
from tests.servers.alert_receivers import running
from tests.servers.memory_store import Fault, MemoryStore, StoreRequest
from tidegate.checkpoints import alert_delivery
from tidegate.checkpoints.driver_requests import (
    DesiredState,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.lease import Lease, evict_lease_holder, read_lease
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.pipeline_identity import ProcessIdentity, ensure_identity
from tidegate.checkpoints.pipeline_overview import PipelineState, read_overview
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import StoreDeniedError
from tidegate.errors import FencedError, PoisonError, TidegateError, TransientError
from tidegate.jobs.driver import epoch_listeners, pipeline_run, startup
from tidegate.jobs.driver.epoch_listeners import EpochListeners
from tidegate.jobs.driver.epoch_loop import RunOutcome
from tidegate.jobs.driver.errors import UNEXPECTED
from tidegate.jobs.driver.pipeline_run import DriverSession, RunContext, RunOptions
from tidegate.jobs.driver.startup import select_start_checkpoint
from tidegate.jobs.sinks.errors import TABLE_MISFIT
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.spark.errors import SPARK_FAILED


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A receiver of metrics and lineage that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OPENLINEAGE_URL", address)
        monkeypatch.setattr(epoch_listeners, "FLUSH_TIMEOUT", 0.2)
        yield


def _session(
    store: MemoryStore, folder: Path, *, standby: bool = False, **fields: Any
) -> tuple[DriverSession, InputView]:
    """A driver that holds the lease and has not begun."""
    spec = spec_of(**fields)
    lease = Lease.acquire(store, spec.name, ProcessIdentity.this_process())
    view = InputView(store, spec, folder)
    options = RunOptions(store_url="memory://", standby=standby)
    retry = Retrying(stop=stop_after_attempt(1), reraise=True)
    context = RunContext(spec, options, store, folder, threading.Event(), retry)
    uid = ensure_identity(store, spec.name)
    session = DriverSession(context, view, lambda: None, uid, lease)  # type: ignore[arg-type,return-value]
    return session, view


@pytest.mark.parametrize("wiped", [True, False])
def test_a_driver_whose_store_was_wiped_names_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wiped: bool
) -> None:
    """Its own error, a file that is gone, says nothing.

    The report outlives the lease, so that the page shows it. With the store in place the error is
    reported as it is.
    """
    store, name = MemoryStore(), spec_of().name
    run, view = _session(store, tmp_path)

    def fail(*_: object) -> None:
        counters = {"read": 90, "released": 80}
        run._status._facts |= {"checkpoint": "t0-000007-ab", "counters": counters}
        for entry in list(store.list_objects(f"{name}/")) if wiped else []:
            store.delete(entry.key)
        raise FileNotFoundError("t0-000001/order.parquet")

    monkeypatch.setattr(DriverSession, "_run", fail)
    with pytest.raises(TidegateError) as raised:
        run.run_to_end()
    run.close()
    view.close()
    assert raised.value.code == ("store.wiped" if wiped else "driver.unexpected")
    overview = read_overview(SlotLog(store, name))
    assert overview.state is PipelineState.FAILED
    if wiped:
        lost = "up to t0-000007-ab and the tables, with 90 rows read and 80 released"
        assert lost in overview.driver.facts["error"]["message"]


@pytest.mark.parametrize("delivered", [True, False])
def test_a_driver_announces_the_error_that_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delivered: bool
) -> None:
    """It needs no Airflow for that; a receiver that is away changes nothing of its end."""
    monkeypatch.setattr(startup, "_LAST_LOOK_LIMIT", 60.0)
    store, alerts = MemoryStore(), {"slack": "env:SLACK_WEBHOOK_URL"}

    def fail(*_: object) -> None:
        raise TABLE_MISFIT(pipeline="p", table="events", cause="x")

    with running() as receivers:
        monkeypatch.setenv("SLACK_WEBHOOK_URL", receivers.environment["SLACK_WEBHOOK_URL"])
        receivers.answers = [] if delivered else [503]
        run, view = _session(store, tmp_path, supervision={"alerts": alerts})
        monkeypatch.setattr(DriverSession, "_run", fail)
        with pytest.raises(TidegateError, match="events"):
            run.run_to_end()
        run.close()
        view.close()
    texts = [body["text"].partition("\n")[0] for _, body in receivers.taken]
    assert len(texts) == delivered
    assert all(text.startswith("*[critical] ") for text in texts)
    assert receivers.refused == []


@pytest.mark.timeout(120)  # the receiver would be waited for for ten minutes
def test_a_receiver_that_never_answers_does_not_keep_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last look for incidents goes on without it, and ends with the process."""
    monkeypatch.setattr(startup, "_LAST_LOOK_LIMIT", 0.2)
    monkeypatch.setattr(alert_delivery, "_READ_LIMIT", 600.0)

    def fail(*_: object) -> None:
        raise TABLE_MISFIT(pipeline="p", table="events", cause="x")

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/services/T0/B0/hush"
        monkeypatch.setenv("SLACK_WEBHOOK_URL", address)
        alerts = {"slack": "env:SLACK_WEBHOOK_URL"}
        run, view = _session(MemoryStore(), tmp_path, supervision={"alerts": alerts})
        monkeypatch.setattr(DriverSession, "_run", fail)
        with pytest.raises(TidegateError, match="events"):
            run.run_to_end()
        run.close()
        view.close()
        looking = [one for one in threading.enumerate() if one.name == "tidegate-alerts"]
        assert len(looking) == 1
        connection, _ = server.accept()
        connection.close()
        looking[0].join()


@pytest.mark.parametrize(
    ("policy", "raised"), [("stop", PoisonError), ("fork", TransientError), ("whole", PoisonError)]
)
def test_a_driver_that_meets_a_damaged_checkpoint_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, raised: type[TidegateError]
) -> None:
    """What its engine says of the file says nothing.

    With `on_bad_checkpoint: fork` the next driver goes back by itself, so it has to be started. If
    the checkpoint is whole, the error is reported as it is.
    """
    bench, _ = sealed()
    store, head = bench.log.store, bench.epochs()[-1]
    assert isinstance(store, MemoryStore)
    monkeypatch.setattr(pipeline_run, "make_followers", lambda *_: [])
    monkeypatch.setattr(pipeline_run, "select_start_checkpoint", lambda *_: None)
    checkpoint = {"on_bad_checkpoint": "fork" if policy == "fork" else "stop"}
    run, view = _session(store, tmp_path, checkpoint=checkpoint)

    class Loop:
        """Fails at a file of its state."""

        trouble = None

        def run(self) -> RunOutcome:
            """Lose the file, and meet that."""
            if policy != "whole":
                store.delete(head.segments[0].key)
            raise OSError("IO Error: order.parquet")

    monkeypatch.setattr(DriverSession, "_make_loop", lambda *_: Loop())
    with pytest.raises(raised) as error:
        run.run_to_end()
    run.close()
    view.close()
    code = {"stop": "checkpoint.damaged", "fork": "checkpoint.left"}.get(
        policy, "driver.unexpected"
    )
    assert error.value.code == code
    assert policy == "whole" or head.segments[0].key in error.value.message


def test_a_wrong_byte_of_state_condemns_what_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes do not show it, so the next driver would start from the same file again."""
    forks, store = {"on_bad_checkpoint": "fork"}, MemoryStore()
    bench = Bench(spec_of(checkpoint=forks), store)
    engine = bench.engine()
    for time in (1, 2, 3):  # the rows of one source wait for the other one
        bench.sources["a"].append(row(time))
        bench.sources["b"].append(row(500 + time))
        engine.run_epoch()
    whole, *needing = bench.epochs()
    (segment,) = {s.key for s in needing[0].segments if s.kind == "order"} - {
        s.key for s in whole.segments
    }
    data = store.get(segment).data
    store.put(segment, data[:20] + bytes([data[20] ^ 0x80]) + data[21:])
    monkeypatch.setattr(pipeline_run, "make_followers", lambda *_: [])
    run, view = _session(store, tmp_path, checkpoint=forks)

    class Loop:
        """Fails at a file of its state."""

        trouble = None

        def run(self) -> RunOutcome:
            """Meet the wrong byte."""
            raise OSError("Couldn't deserialize thrift")

    monkeypatch.setattr(DriverSession, "_make_loop", lambda *_: Loop())
    with pytest.raises(TransientError, match=segment) as error:
        run.run_to_end()
    run.close()
    view.close()
    assert error.value.code == "checkpoint.left"
    assert RootsFile(store, "p").read().condemned.keys() == {str(epoch.id) for epoch in needing}
    lease = Lease.acquire(store, "p", ProcessIdentity.this_process())
    select_start_checkpoint(bench.spec, bench.log, lease, "latest")
    assert bench.log.head().checkpoint == whole.id


@pytest.mark.parametrize("code", ["store.denied", "store.keys_expired"])
def test_a_run_ends_as_it_ended_although_its_lease_cannot_be_given_back(
    tmp_path: Path, code: str
) -> None:
    """A store that refuses just then makes no failure of a run that is over; the lease expires."""
    store = MemoryStore()
    run, view = _session(store, tmp_path)

    def refuse(request: StoreRequest) -> Fault | None:
        raise StoreDeniedError("403", code=code)

    store.hook = refuse
    run.close()
    view.close()


@pytest.mark.parametrize("fault", ["away", "denied"])
def test_a_finished_run_stays_finished_although_it_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The note that no driver is wanted only spares the next standby a start."""
    store = MemoryStore()
    monkeypatch.setattr(pipeline_run, "make_followers", lambda *_: [])
    run, view = _session(store, tmp_path, standby=True)

    def refuse(request: StoreRequest) -> Fault | None:
        if request.key.endswith("/desired.json"):
            if fault == "denied":
                raise StoreDeniedError("403", code="store.denied")
            return Fault.REFUSED
        return None

    class Loop:
        """Finds nothing more to read."""

        trouble = None

        def run(self) -> RunOutcome:
            """Let the store fail, and end."""
            store.hook = refuse
            return RunOutcome("finished", "every source is read to its end")

    monkeypatch.setattr(DriverSession, "_make_loop", lambda *_: Loop())
    assert run.run_to_end().state == "finished"
    run.close()
    view.close()


def test_a_finished_run_that_has_lost_its_lease_stops_no_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store was away from it, someone restored the pipeline and started it again."""
    store, name = MemoryStore(), spec_of().name
    monkeypatch.setattr(pipeline_run, "make_followers", lambda *_: [])
    run, view = _session(store, tmp_path, standby=True)

    class Loop:
        """Finds nothing more to read."""

        trouble = None

        def run(self) -> RunOutcome:
            """Lose the lease, and end."""
            evict_lease_holder(store, name)
            with pytest.raises(FencedError):
                run._steps.lease.renew()
            set_desired_state(store, name, DesiredState.RUN, who="ann")
            return RunOutcome("finished", "every source is read to its end")

    monkeypatch.setattr(DriverSession, "_make_loop", lambda *_: Loop())
    assert run.run_to_end().state == "finished"
    run.close()
    view.close()
    assert read_desired_state(store, name).state is DesiredState.RUN


def test_a_driver_that_tries_an_epoch_again_reports_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while its state is "running", or a look just then would find it well."""
    store = MemoryStore()
    monkeypatch.setattr(pipeline_run, "make_followers", lambda *_: [])
    run, view = _session(store, tmp_path)
    reported: list[dict[str, Any]] = []

    class Loop:
        """Is asked for its trouble."""

        trouble = TransientError("the table is away", code="sink.unavailable")

        def run(self) -> RunOutcome:
            """Report, and end."""
            run._status.set_state("running")
            reported.append(run._status.snapshot())
            return RunOutcome("stopped", "asked to")

    monkeypatch.setattr(DriverSession, "_make_loop", lambda *_: Loop())
    run.run_to_end()
    run.close()
    view.close()
    assert [facts["trouble"]["code"] for facts in reported] == ["sink.unavailable"]


@pytest.mark.usefixtures("mute")
def test_the_lease_is_free_before_the_collector_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next driver need not wait for it."""
    store, spec = MemoryStore(), spec_of()
    run, view = _session(store, tmp_path)
    free: list[bool] = []
    really = EpochListeners.close

    def close(observers: EpochListeners) -> None:
        seen = read_lease(store, spec.name)
        free.append(seen is not None and seen.is_free)
        really(observers)

    monkeypatch.setattr(EpochListeners, "close", close)
    run.close()
    view.close()
    assert free == [True]


@pytest.mark.usefixtures("mute")
@pytest.mark.timeout(20)  # the SDK by itself would wait for 30 s, lineage for 15
def test_last_words_are_bounded() -> None:
    """A mute receiver costs what is allowed for it, and a line in the log; nothing is raised."""
    bench, reports = sealed()
    observers = EpochListeners(bench.spec, bench.store, lambda: FACTS, lambda *_: None)
    for report in reports:
        observers.on_epoch(report, 0.1)
    with structlog.testing.capture_logs() as logs:
        observers.close()
    assert "lineage_dropped" in [line["event"] for line in logs]


def test_errors_that_come_back_at_each_start_say_how_to_go_on() -> None:
    """A person who only starts the pipeline again gets nowhere: the rows are sealed."""
    errors: list[TidegateError] = [
        SPARK_FAILED(pipeline="p", cause="ARITHMETIC_OVERFLOW"),
        TABLE_MISFIT(table="events", cause="a value"),
        UNEXPECTED(pipeline="p", kind="KeyError", text="k"),
    ]
    for error in errors:
        assert "restore" in str(error.advice), error.code
        assert "sealed" in str(error.kept), error.code


def test_alerts_that_are_malformed_are_a_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stop no driver, and its log alone would say that nothing is announced."""
    monkeypatch.setattr(pipeline_run, "make_followers", lambda *_: [])
    monkeypatch.setenv("TIDEGATE_ALERTS", "slack")
    run, view = _session(MemoryStore(), tmp_path)
    run.close()
    view.close()
    trouble = run._trouble
    assert trouble is not None
    assert trouble.code == "alerts.malformed"
    monkeypatch.delenv("TIDEGATE_ALERTS")
    run, view = _session(MemoryStore(), tmp_path)
    run.close()
    view.close()
    assert run._trouble is None
