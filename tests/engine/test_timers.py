"""Every timer of the pipeline clock, across outages and with epochs far apart (semantics.md, 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine.harness import SECOND, Bench, PlainSteps, barrier, row, spec_of
from tests.servers.memory_store import Fault, MemoryStore
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.errors import TransientError
from tidegate.jobs.driver.status_reporter import DriverSteps
from tidegate.jobs.engine.epoch_engine import Engine, EpochReport
from tidegate.jobs.eventtime.pipeline_clock import read_pipeline_time

DAY = 86_400.0
PART = 300.0  # seconds between two attempts while something is away; 24 of them are two hours
LIMIT = 120  # seconds of each timer
NEVER = {"coalesce": {"idle_timeout": "never"}}


@dataclass(frozen=True)
class Timer:
    """A timer that runs after the first epoch of a pipeline.

    Attributes:
        fields: what the spec says.
        feed: what the first epoch reads of source a; source b stays silent.
        has_expired: whether a decision says that it ran out.
    """

    fields: Mapping[str, Any]
    feed: tuple[dict[str, Any], ...]
    has_expired: Callable[[Any], bool]


def _recorded(kind: str, **facts: Any) -> Callable[[Any], bool]:
    return lambda decision: any(
        entry["kind"] == kind and all(entry.get(k) == v for k, v in facts.items())
        for entry in decision.recorded
    )


TIMERS = {
    "idle member": Timer(
        {"coalesce": {"idle_timeout": f"{LIMIT}s"}}, (row(1),), _recorded("idle", member="a/0")
    ),
    "idle source": Timer(
        {"coalesce": {"idle_timeout": f"{LIMIT}s"}}, (row(1),), _recorded("idle", source="b")
    ),
    "barrier": Timer(
        {**NEVER, "barriers": {"timeout": f"{LIMIT}s"}},
        (row(1), barrier(2, 1)),
        lambda decision: bool(decision.barriers),
    ),
    "build window": Timer(
        {**NEVER, "release": {"build_window": f"{LIMIT}s"}},
        (row(1),),
        _recorded("residence_expired"),
    ),
    "start-up grace": Timer(
        {**NEVER, "release": {"startup_grace": f"{LIMIT}s"}},
        (row(1),),
        _recorded("startup_grace_over"),
    ),
}


class Driver:
    """An engine with the real steps and lease, whose renewal thread is played by `work`."""

    def __init__(self, timer: Timer) -> None:
        self.bench = Bench(spec_of(**timer.fields), MemoryStore())
        self.timer, self.clock = timer, self.bench.clock
        self.bench.sources["a"].append(*timer.feed)
        self.start()

    def start(self) -> None:
        """A new process takes the lease and goes on at the head."""
        lease = Lease.acquire(
            self.bench.store, "p", ProcessIdentity.this_process(), clock=self.clock
        )
        self.steps = DriverSteps(lease, self.bench.spec.checkpoint.max_clock_step, self.clock)
        self.engine: Engine = self.bench.engine(steps=self.steps)  # type: ignore[arg-type]

    def work(self, seconds: float) -> None:
        """Time passes, and the lease is renewed every two seconds."""
        while seconds > 0:
            passed = min(2.0, seconds)
            seconds -= passed
            self.clock.advance(passed)
            self.steps.enter("wait")
            self.steps.renew_once()

    def epoch(self) -> EpochReport:
        """One epoch."""
        return self.engine.run_epoch()

    def expired(self, report: EpochReport) -> bool:
        """Whether the timer ran out in this epoch."""
        return self.timer.has_expired(report.decision)


def _store_away(driver: Driver) -> None:
    """The store answers nothing for two hours; the driver tries again and again."""
    assert isinstance(driver.bench.store, MemoryStore)
    driver.bench.store.hook = lambda request: Fault.REFUSED
    for _ in range(24):
        driver.work(PART)
        with pytest.raises(TransientError):
            driver.engine.reload()
    driver.bench.store.hook = None
    driver.steps.renew_once()
    driver.engine.reload()


def _source_away(driver: Driver) -> None:
    """A broker answers nothing for two hours, while the store is well and the lease is held."""
    source = driver.bench.sources["a"]
    list_members = source.list_members

    def refuse() -> Any:
        raise TransientError("the broker is away", code="kafka.unavailable")

    source.list_members = refuse  # type: ignore[method-assign]
    for _ in range(24):
        driver.work(PART)
        with pytest.raises(TransientError):
            driver.epoch()
        driver.engine.reload()
    source.list_members = list_members  # type: ignore[method-assign]


def _host_asleep(driver: Driver) -> None:
    """The host sleeps for a day, and then renews its lease."""
    driver.clock.advance(DAY)
    driver.steps.enter("wait")
    driver.steps.renew_once()


def _driver_away(driver: Driver) -> None:
    """No driver runs for a day."""
    driver.steps.lease.release()
    driver.clock.advance(DAY)
    driver.start()


OUTAGES = {
    "store away": _store_away,
    "source away": _source_away,
    "host asleep": _host_asleep,
    "no driver": _driver_away,
}


@pytest.mark.parametrize("timer", TIMERS)
@pytest.mark.parametrize("outage", OUTAGES)
def test_a_long_outage_expires_no_timer(outage: str, timer: str) -> None:
    """A gap counts at most `max_clock_step`, at once and in the epochs after it."""
    driver = Driver(TIMERS[timer])
    assert not driver.expired(driver.epoch())
    driver.work(40)
    assert not driver.expired(driver.epoch())
    OUTAGES[outage](driver)
    worked = 40 + 10  # seconds; the gap counts 10 s
    while worked < LIMIT - 10:
        assert not driver.expired(driver.epoch()), f"after {worked} s"
        driver.work(4)
        worked += 4
    waited = 0
    while not driver.expired(driver.epoch()):
        driver.work(4)
        waited += 4
        assert waited <= 32, "the timer ran out too late"


@pytest.mark.parametrize("timer", TIMERS)
def test_timers_keep_their_pace_with_epochs_far_apart(timer: str) -> None:
    """With epochs five minutes apart a timer of two minutes runs out in the next epoch."""
    driver = Driver(TIMERS[timer])
    assert not driver.expired(driver.epoch())
    driver.work(300)
    assert driver.expired(driver.epoch())


@pytest.mark.parametrize("timer", TIMERS)
def test_restarts_take_little_from_a_timer(timer: str) -> None:
    """Drivers that live for half a minute each reach a timer of two minutes."""
    driver = Driver(TIMERS[timer])
    driver.epoch()
    lives, found = 0, [False]
    while not any(found):
        found = []
        for _ in range(15):
            driver.work(2)
            found.append(driver.expired(driver.epoch()))
        driver.steps.lease.release()
        driver.start()
        lives += 1
        assert lives <= 6, "the timer ran out too late"
    assert lives >= 4


def test_the_manifest_records_both_clocks() -> None:
    """The pipeline clock stays behind after a gap, the recorded wall clock does not; without a gap
    the state has no further field.
    """
    driver = Driver(TIMERS["build window"])
    driver.epoch()
    assert "uncounted" not in _newest(driver.bench).decider
    driver.work(20)
    _host_asleep(driver)
    driver.bench.sources["a"].append(row(5))
    driver.epoch()
    time = read_pipeline_time(_newest(driver.bench).decider)
    assert time is not None
    assert time.clock == _newest(driver.bench).decision["now"]
    assert time.wall == _newest(driver.bench).recorded_now == driver.clock.wall_ticks()
    assert time.uncounted == (DAY - 10) * SECOND


def _newest(bench: Bench) -> Manifest:
    record = bench.log.head().record
    assert record is not None
    return record


def _bench_with_max_jump(ticks: int) -> Bench:
    plain = spec_of(**NEVER)
    sources = {
        name: source.model_copy(update={"max_jump": ticks})
        for name, source in plain.sources.items()
    }
    return Bench(plain.model_copy(update={"sources": sources}))


def test_a_max_jump_below_the_pace_of_epochs_stops_nothing() -> None:
    """After an epoch that only recorded the clock, the next one reads, whatever its distance."""
    bench = _bench_with_max_jump(SECOND)
    engine = bench.engine()
    found = []
    for _ in range(6):
        bench.sources["a"].append(row(bench.clock.wall_ticks() / SECOND))
        found.append(engine.run_epoch().rows)
        bench.clock.advance(5)
    assert found == [0, 1, 0, 1, 0, 1]


def test_rows_after_an_outage_are_not_in_the_future() -> None:
    """With `max_jump`, an epoch after a silence records the clock before it judges the first row."""
    plain = spec_of(**NEVER)
    hour = 3600 * SECOND
    sources = {
        name: source.model_copy(update={"max_jump": hour}) for name, source in plain.sources.items()
    }
    bench = Bench(plain.model_copy(update={"sources": sources}))

    def now() -> float:
        return bench.clock.wall_ticks() / SECOND

    engine = bench.engine(steps=PlainSteps(bench.clock))
    bench.sources["a"].append(row(now()))
    assert [engine.run_epoch().rows for _ in range(2)] == [0, 1]
    bench.clock.advance(DAY)
    assert engine.run_epoch().sealed is None, "a silent stream writes nothing"
    bench.sources["a"].append(row(now()), row(now() + 7200))
    reports = [engine.run_epoch() for _ in range(2)]
    assert [report.rows for report in reports] == [0, 1]
    assert [entry["reason"] for entry in bench.rows("late")] == ["max_jump"]


def test_times_for_people_stay_on_the_wall_clock() -> None:
    """After a gap, the health of a barrier has times of the wall clock, while its wait counts worked
    time only.
    """
    driver = Driver(TIMERS["barrier"])
    driver.epoch()
    driver.work(20)
    _host_asleep(driver)
    while not driver.expired(driver.epoch()):
        driver.work(4)
    (closed,) = [r for r in driver.bench.rows("barriers") if r["outcome"] != "complete"]
    age = driver.clock.wall_ticks() - closed["closed"].timestamp() * SECOND
    assert 0 <= age < 10 * SECOND
    assert LIMIT * SECOND <= closed["waited_us"] < (LIMIT + 10) * SECOND


def _next_clock(bench: Bench, engine: Engine) -> float:
    """The pipeline clock of one more epoch, in seconds."""
    bench.sources["a"].append(row(1))
    decision = engine.run_epoch().decision
    assert decision is not None
    return decision.now / SECOND


def test_a_look_at_the_log_takes_no_time_from_the_timers() -> None:
    """A driver that reads the same head again counts all that it has worked since."""
    bench = Bench(spec_of(**NEVER))
    engine = bench.engine()
    before = _next_clock(bench, engine)
    bench.clock.advance(300)
    engine.reload()
    assert _next_clock(bench, engine) - before == 300


def test_a_driver_behind_another_counts_from_the_epoch_of_that_one() -> None:
    """What a driver worked before another one sealed an epoch is not counted again."""
    bench = Bench(spec_of(**NEVER))
    engine = bench.engine()
    _next_clock(bench, engine)
    bench.clock.advance(300)
    before = _next_clock(bench, bench.engine())
    engine.reload()
    bench.clock.advance(5)
    assert _next_clock(bench, engine) - before == 5
