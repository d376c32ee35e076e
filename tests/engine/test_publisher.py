"""The publisher's thread: it outlives outages, and never ends unseen."""

from __future__ import annotations

import threading
import time

import pytest

from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import StoreDeniedError
from tidegate.errors import PoisonError, TidegateError, TransientError
from tidegate.jobs.engine.interfaces import NoFaults
from tidegate.jobs.engine.publisher import Publisher


class Sink:
    """Raises the given errors, then applies everything; `behind` is its lag before that."""

    def __init__(
        self, *errors: Exception, lag_errors: tuple[Exception, ...] = (), behind: int = 0
    ) -> None:
        self.name, self.behind = "fake", behind
        self.errors, self.lag_errors = list(errors), list(lag_errors)
        self.calls = 0

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """Raise what is planned."""
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        self.behind = 0
        return 1

    def lag(self, log: SlotLog) -> int:
        """Raise what is planned."""
        if self.lag_errors:
            raise self.lag_errors.pop(0)
        return self.behind


def publisher(sink: Sink, group: int = 1) -> Publisher:
    """A started publisher with one sealed slot to publish."""
    found = Publisher([sink], SlotLog(MemoryStore(), "p"), NoFaults(), group=group)
    found.start(1, 1)
    return found


@pytest.mark.parametrize("group", [1, 3])
def test_an_outage_is_waited_out(group: int) -> None:
    """Transient failures of a sink, also of asking how far it is, end with everything published."""
    away = TransientError("the catalog is away", code="sink.unavailable")
    own = publisher(Sink(away, lag_errors=(away,) if group > 1 else ()), group)
    assert own.drain(10.0)
    own.stop()
    assert own.wait_below(1, 0.0)
    assert own.trouble is None


def test_a_store_that_refuses_the_first_publishing_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys may expire just then; only a refusal that lasts ends the thread."""
    denied = StoreDeniedError("403 ExpiredToken", code="store.denied")
    own = publisher(Sink(denied))
    assert own.drain(10.0)
    own.stop()
    monkeypatch.setattr("tidegate.jobs.engine.publisher._DENIED_PATIENCE", 0.0)
    lasting = publisher(Sink(denied))
    with pytest.raises(StoreDeniedError):
        lasting.drain(10.0)
    lasting.stop()


def test_a_failing_question_does_not_end_the_retries() -> None:
    """How far a sink is is asked between two tries for information only."""
    away = TransientError("the catalog is away", code="sink.unavailable")
    own = publisher(Sink(away, lag_errors=(ZeroDivisionError("oops"),)))
    assert own.drain(10.0)
    own.stop()


def test_an_unexpected_error_is_seen() -> None:
    """The thread ends, the driver gets a sentence, and the cause is kept for the log."""
    own = publisher(Sink(ZeroDivisionError("oops")))
    with pytest.raises(
        PoisonError, match="publishing failed with ZeroDivisionError: oops"
    ) as caught:
        own.drain(10.0)
    own.stop()
    assert caught.value.kept
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_wakes_a_driver_that_waits() -> None:
    """What ends a sink is raised at once, and not when the driver has waited long enough."""
    release, began = threading.Event(), time.monotonic()

    class Late(Sink):
        def follow(self, log: SlotLog, *, flush: bool = True) -> int:
            release.wait(60.0)  # the driver's question lets it go, under the lock of the wait
            raise PoisonError("misfit", code="sink.misfit")

    def let_go(_thread: object) -> bool:
        release.set()
        return False

    own = publisher(Late())
    with pytest.raises(PoisonError, match="misfit"):
        own._wait_for_all(let_go, 60.0)
    own.stop()
    assert time.monotonic() - began < 60.0


def test_a_stop_between_two_tries_keeps_the_failure_as_it_is() -> None:
    """A sink that is away when the driver ends has an outage, and not a defect."""
    own = publisher(Sink(*[TransientError("away", code="sink.unavailable")] * 1000))
    while own.trouble is None:
        own.wait_below(1, 0.01)
    own.stop()
    with pytest.raises(TransientError, match="away"):
        own.drain(0.0)


def test_what_cannot_be_retried_ends_it() -> None:
    """Poison of a sink reaches the driver as it is."""
    own = publisher(Sink(TidegateError("misfit", code="sink.misfit")))
    with pytest.raises(TidegateError, match="misfit"):
        own.drain(10.0)
    own.stop()


def test_a_sink_that_is_away_does_not_hold_up_the_others() -> None:
    """Each follows by itself.

    The driver waits for the slowest, and says which has how far to go.
    """
    failures = [TransientError("away", code="sink.unavailable")] * 1000
    well, away = Sink(), Sink(*failures, behind=3)
    well.name, away.name = "well", "away"
    both = Publisher([well, away], SlotLog(MemoryStore(), "p"), NoFaults())
    both.start(1, 3)
    try:
        while both.wait_below(1, 0.05):  # one failure alone does not make a new sink hold others up
            pass
        while both.trouble is None or both.lags["well"]:
            both.wait_below(1, 0.05)
        assert both.lags == {"well": 0, "away": 3}
        assert both.publish_seconds.keys() == {"well"}
        assert both.unpublished_count == 3
        away.errors.clear()
        assert both.drain(20.0)
        assert both.publish_seconds["away"] > both.publish_seconds["well"]  # the wait is in it
    finally:
        both.stop()


def test_a_new_slot_is_published_without_being_asked_for() -> None:
    """A sink's thread that waits is woken when the driver has sealed an epoch."""
    own = publisher(Sink())
    try:
        for slot in range(2, 200):  # in one of them, if not in each, the thread waits already
            assert own.wait_below(1, 10.0)
            own.note_sealed(1, slot)
        assert own.drain(10.0)
    finally:
        own.stop()


def test_a_new_driver_does_not_count_what_an_earlier_one_published() -> None:
    """A sink that is away lags by what it says itself, not by the whole log, also at the start."""
    away = [TransientError("away", code="sink.unavailable")] * 1000
    sink = Sink(*away, behind=2)
    own = Publisher([sink], SlotLog(MemoryStore(), "p"), NoFaults())
    own.start(0, 5_000)
    try:
        assert own.lags["fake"] <= 2
        while own.lags != {"fake": 2}:
            own.wait_below(5_000, 0.01)
        own.note_sealed(0, 5_001)
        assert (own.lags, own.unpublished_count) == ({"fake": 3}, 3)
        assert not own.drain(0.01)
    finally:
        sink.errors.clear()
        own.stop()


def test_all_slots_count_while_a_new_driver_cannot_ask_a_sink() -> None:
    """The driver waits for it, so what it says must not be that nothing is missing."""
    away = TransientError("away", code="sink.unavailable")
    sink = Sink(*[away] * 1000, lag_errors=(away,) * 4, behind=2)
    own = Publisher([sink], SlotLog(MemoryStore(), "p"), NoFaults())
    own.start(1, 5_000)
    try:
        while own.wait_below(50, 0.01):  # the second failure ends the patience
            pass
        assert own.lags == {"fake": 5_000}
    finally:
        sink.errors.clear()
        own.stop()


def test_a_sink_that_gets_on_catches_up_while_the_driver_seals_more() -> None:
    """What it has applied counts, and not its lag, which grows meanwhile."""
    sink, third_try, rest = Sink(behind=3), threading.Event(), threading.Event()
    own = Publisher([sink], SlotLog(MemoryStore(), "p"), NoFaults())
    follow, sealed = sink.follow, iter(((1, 8), (1, 12)))

    def follow_slowly(log: SlotLog, *, flush: bool = True) -> int:
        head = next(sealed, None)
        if head is None:
            third_try.set()
            rest.wait(30.0)
            return follow(log, flush=flush)
        own.note_sealed(*head)
        sink.behind += 3
        raise TransientError("one part failed", code="sink.unavailable")

    sink.follow = follow_slowly  # type: ignore[method-assign]
    own.start(1, 4)
    try:
        assert third_try.wait(30.0)
        assert own.wait_below(1, 0.01)
    finally:
        rest.set()
        own.stop()


def test_slots_of_an_abandoned_timeline_do_not_count_as_published() -> None:
    """After a restore a sink is followed again, though its last slot had a greater number."""
    sink = Sink()
    own = publisher(sink)
    own.note_sealed(1, 10)
    assert own.drain(10.0)
    calls = sink.calls
    own.note_sealed(2, 4)
    try:
        assert own.drain(10.0)
        assert (sink.calls, own.unpublished_count) == (calls + 1, 0)
        sink.errors.extend([TransientError("away", code="sink.unavailable")] * 1000)
        own.note_sealed(3, 2)
        assert own.lags == {"fake": 2}
    finally:
        sink.errors.clear()
        own.stop()


class GroupingSink(Sink):
    """Leaves the two newest slots for a full group, unless `flush` is set.

    Attributes:
        asked: set by the first publishing.
        again: set by the second one.
    """

    def __init__(self) -> None:
        super().__init__(behind=2)
        self.asked, self.again = threading.Event(), threading.Event()

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """Publish what is left if `flush`."""
        self.calls += 1
        (self.asked if self.calls == 1 else self.again).set()
        self.behind = 0 if flush else 2
        return 1


def grouping() -> tuple[Publisher, GroupingSink]:
    """A publisher of groups of three, whose sink has left two slots, and its sink."""
    sink = GroupingSink()
    found = Publisher([sink], SlotLog(MemoryStore(), "p"), NoFaults(), group=3)
    found.start(1, 5)
    assert sink.asked.wait(10.0)
    return found, sink


def test_a_sink_without_groups_is_not_asked_how_far_it_has_come() -> None:
    """Each question costs requests; without groups everything is published after `follow`."""
    asked: list[int] = []

    class Asked(Sink):
        def lag(self, log: SlotLog) -> int:
            asked.append(1)
            return super().lag(log)

    own = publisher(Asked())
    while not own.publish_seconds:
        own.wait_below(1, 0.01)
    own.stop()
    assert len(asked) == 1  # when its thread began


def test_a_group_that_is_not_full_is_published_at_the_end() -> None:
    """What the sink left for a full group counts as unpublished, and draining publishes it."""
    own, sink = grouping()
    assert own.drain(10.0)
    own.stop()
    assert (sink.calls, sink.behind) == (2, 0)


def test_a_group_that_is_not_full_is_not_tried_again_for_nothing() -> None:
    """A driver that names the same head again has no work for the sink."""
    own, sink = grouping()
    own.note_sealed(1, 5)
    assert not sink.again.wait(0.1)
    own.stop()


def test_a_driver_waits_no_longer_than_for_the_publishing() -> None:
    """The wait ends as soon as everything is published, or with the error of a sink."""
    began = time.monotonic()
    own = publisher(Sink())
    assert own.drain(10.0)
    own.stop()
    own = publisher(Sink(PoisonError("misfit", code="sink.misfit")))
    with pytest.raises(PoisonError):
        own.drain(10.0)
    own.stop()
    assert time.monotonic() - began < 10.0


def test_before_its_start_a_publisher_lags_by_nothing() -> None:
    """No slot counts before the driver has said where the log ends."""
    own = Publisher([Sink(behind=3)], SlotLog(MemoryStore(), "p"), NoFaults())
    assert (own.lags, own.unpublished_count) == ({"fake": 0}, 0)
    assert Publisher([], SlotLog(MemoryStore(), "p"), NoFaults()).unpublished_count == 0


def test_a_driver_can_be_killed_on_either_side_of_the_publishing() -> None:
    """The points where tests inject faults are reached before and after the sink has followed."""
    sink, reached = Sink(), list[tuple[str, int]]()

    class Points:
        def reach(self, point: str) -> None:
            reached.append((point, sink.calls))

    own = Publisher([sink], SlotLog(MemoryStore(), "p"), Points())
    own.start(1, 1)
    assert own.drain(10.0)
    own.stop()
    assert reached == [("publish.start", 0), ("publish.done", 1)]


def test_a_sink_that_hangs_does_not_keep_a_driver_alive() -> None:
    """A process ends although a sink's call does not return: an interpreter waits for no daemon."""
    inside, release = threading.Event(), threading.Event()

    class Hanging(Sink):
        def follow(self, log: SlotLog, *, flush: bool = True) -> int:
            inside.set()
            release.wait(10.0)
            return super().follow(log, flush=flush)

    own = publisher(Hanging())
    assert inside.wait(10.0)
    held = [
        thread for thread in threading.enumerate() if thread.name.startswith("tidegate-publish")
    ]
    release.set()
    own.stop()
    assert [thread.daemon for thread in held] == [True]
