"""Which epochs are judged in which slices, and what is remembered of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epochs import retire_epoch, seal_epoch
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.illness_record import (
    IllnessRecord,
    IllRange,
    TimelineHealth,
    forget_retired,
    is_verdict_stale,
    read_illness,
    replace_unreadable,
    write_illness,
)
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.expectations.epoch_slices import (
    MOST_SLICES,
    EpochSlice,
    Failure,
    note_verdicts,
    plan_slices,
)
from tidegate.jobs.spec.operations import QualitySpec

BY_COUNT = QualitySpec()


def number_epochs(first: int, last: int) -> list[tuple[int, int]]:
    """Epochs that were sealed at their numbers."""
    return [(n, n) for n in range(first, last + 1)]


def test_everything_since_the_previous_run_is_judged() -> None:
    """690 epochs, slices of 20: the last short slice is judged with epochs before it."""
    plan = plan_slices(number_epochs(1, 690), 0, 20, BY_COUNT, 0)
    assert [part.since for part in plan.slices] == [*range(0, 690, 20)]
    assert (plan.judged, plan.newest, plan.last) == (
        690,
        EpochSlice(670, 690),
        EpochSlice(680, 690),
    )


def test_a_run_does_not_judge_without_bound() -> None:
    """After a long pause the oldest slices come first, and the newest epochs are judged anyway."""
    head = (MOST_SLICES + 5) * 2
    plan = plan_slices(number_epochs(1, head), 0, 2, BY_COUNT, 0)
    assert (len(plan.slices), plan.judged) == (MOST_SLICES, 2 * MOST_SLICES)
    assert (plan.newest, plan.last) == (EpochSlice(head - 2, head), None)
    health = note_verdicts(TimelineHealth(), plan, [[]] * MOST_SLICES, [("x", 1, head)])
    assert health.newest == (IllRange(check="x", first=head - 1, last=head),)
    assert health.find_illness(head) is not None
    assert health.find_illness(head - 2) is None
    rest = plan_slices(number_epochs(1, head), plan.judged, 2, BY_COUNT, 0)
    assert rest.judged == head
    assert note_verdicts(health, rest, [[]] * len(rest.older), []).newest == ()


def test_slices_of_a_time_hold_what_was_sealed_within_it() -> None:
    """`recent_time`: no slice is longer, and each epoch is in one."""
    quality = QualitySpec(recent_time=10)
    epochs = [(1, 0), (2, 5), (3, 10), (4, 11), (5, 40), (6, 45), (7, 46)]
    plan = plan_slices(epochs, 0, 20, quality, 47)
    assert [(part.since, part.last) for part in plan.slices] == [(0, 3), (3, 4), (4, 7)]
    assert plan.newest == EpochSlice(4, 7)
    assert plan.last == EpochSlice(4, 7)


@dataclass
class Model:
    """A log of good and bad epochs on timelines, with a check that fails if over half are bad."""

    size: int
    bad: list[bool] = field(default_factory=list)  # of the current lineage
    begins: int = 0  # slots up to this one are of earlier timelines
    timeline: int = 0
    record: dict[int, TimelineHealth] = field(default_factory=dict)
    truth: dict[int, dict[int, bool]] = field(default_factory=dict)
    kept: int = 0  # manifests after this epoch are kept

    def fails(self, since: int, last: int) -> bool:
        """Whether the check fails for a window."""
        own = self.bad[since:last]
        return 2 * sum(own) > len(own)

    def judge(self, *, is_broken: bool) -> None:
        """A quality run; a broken check fails, and says nothing about epochs."""
        head = len(self.bad)
        if head == self.begins:
            return
        health = self.record.get(self.timeline) or TimelineHealth(
            since=self.begins, judged=self.begins, head=self.begins, newest_since=self.begins
        )
        start = max(health.judged, self.kept)
        epochs = number_epochs(self.kept + 1, head)
        plan = plan_slices(epochs, start, self.size, BY_COUNT, head)
        plan = plan.separate_ill(health.ill)

        def list_failures(part: EpochSlice) -> list[Failure]:
            failed = self.fails(part.since, part.last) and not is_broken
            return [("x", part.since + 1, part.last)] if failed else []

        older = [list_failures(part) for part in plan.older]
        self.record[self.timeline] = note_verdicts(health, plan, older, list_failures(plan.newest))
        self.recompute(start, head, is_broken=is_broken)

    def recompute(self, start: int, head: int, *, is_broken: bool) -> None:
        """The same in plain words: every new epoch gets the verdict of its slice, once."""
        truth = self.truth.setdefault(self.timeline, {})
        first = start
        while first < head:
            last = min(first + self.size, head)
            window = max(self.kept, last - self.size)
            before_ill = any(truth.get(n, False) for n in range(window + 1, start + 1))
            if window < first and before_ill:
                window = first
            for n in range(first + 1, last + 1):
                truth[n] = self.fails(window, last) and not is_broken
            first = last


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("seal"), st.integers(1, 7), st.booleans()),
        st.tuples(st.just("run"), st.booleans(), st.just(0)),
        st.tuples(st.just("restore"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("retire"), st.integers(0, 9), st.just(0)),
    ),
    min_size=1,
    max_size=30,
)


@given(STEPS, st.integers(1, 6))
def test_what_is_remembered_is_what_a_plain_recomputation_finds(
    steps: list[tuple[str, int, int]], size: int
) -> None:
    """Over any sequence of epochs, runs, broken runs, restores and retention."""
    model = Model(size)
    for what, number, flag in steps:
        if what == "seal":
            model.bad += [bool(flag)] * number
        elif what == "run":
            model.judge(is_broken=bool(number))
        elif what == "restore":
            target = max(model.kept, len(model.bad) - number)
            del model.bad[target:]
            model.timeline += 1
            model.begins = target
        else:
            model.kept = max(model.kept, min(len(model.bad) - 1, len(model.bad) - number), 0)
    for timeline, truth in model.truth.items():
        health = model.record[timeline]
        found = {n: health.find_illness(n) is not None for n in truth}
        assert found == truth
        # A checkpoint behind the newest run continues its state.
        newest = max(truth)
        assert (health.find_illness(newest + 5) is not None) == truth[newest]


def ill(first: int, last: int) -> TimelineHealth:
    """A timeline of which some epochs are ill."""
    one = IllRange(check="x", first=first, last=last)
    return TimelineHealth(since=0, judged=50, head=50, newest_since=50, ill=(one,))


def find_ill(store: MemoryStore, slots: range = range(1, 61)) -> set[int]:
    """Slots that the record calls ill."""
    record = read_illness(store, "p")
    return {n for n in slots if record.explain_illness(CheckpointId(0, n, "aaaaaa"))}


def test_a_damaged_history_makes_nothing_healthy() -> None:
    """The list of runs is a cache; the ranges are kept apart from it."""
    store = MemoryStore()
    write_illness(store, "p", 0, ill(11, 40))
    store.put("p/quality/history.json", b"{damaged")
    assert find_ill(store) == {*range(11, 41)}


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"timelines": {"0": {"ill": 7}}}'])
def test_a_damaged_record_comes_back_from_a_result(damage: bytes) -> None:
    """Each result has a copy; without any no checkpoint counts as healthy until the next run."""
    store = MemoryStore()
    write_illness(store, "p", 0, ill(11, 40))
    copy = read_illness(store, "p").model_dump(mode="json")
    store.put("p/quality/illness.json", damage)
    assert find_ill(store) == {*range(1, 61)}
    renewed = {"illness": copy, "id": "run1"}
    store.put("p/quality/results/20261128T100000.json", canonical_bytes(renewed))
    store.put("p/quality/results/20261128T110000.json", b"{")
    assert find_ill(store) == {*range(11, 41)}
    replace_unreadable(store, "p", read_illness(store, "p"))
    assert find_ill(store) == {*range(11, 41)}
    assert parse_json(store.get("p/quality/illness.json").data)["lost"] is False


def test_a_damaged_history_of_an_older_version_comes_back_from_its_results() -> None:
    """The results are what it listed; a history that lost them too leaves nothing known."""
    store = MemoryStore()
    store.put("p/quality/history.json", b"{")
    assert find_ill(store) == {*range(1, 61)}
    failed = [{"id": "x", "severity": "critical", "epochs": [3, 5]}]
    result = {"id": "r", "checkpoint": "t0-000005-aaaaaa", "recent_since": 2, "failed": failed}
    store.put("p/quality/results/r.json", canonical_bytes(result))
    assert find_ill(store) == {*range(3, 61)}


def test_ranges_go_with_the_epochs_that_they_name() -> None:
    """Retention bounds what is remembered, and nothing else does."""
    store = MemoryStore()
    log = SlotLog(store, "p")
    for _ in range(6):
        seal_epoch(log)
    ranges = [IllRange(check="x", first=n, last=n) for n in (1, 3, 5)]
    write_illness(store, "p", 0, TimelineHealth(judged=6, head=6, newest_since=6, ill=(*ranges,)))
    for slot in (1, 2, 3):
        retire_epoch(log, slot)
    forget_retired(store, SlotLog(store, "p"))
    assert read_illness(store, "p").timelines[0].ill == (ranges[2],)


def test_of_two_runs_at_once_the_farther_one_stays() -> None:
    """The slower one has judged less, and must not take back what the other has found."""
    store = MemoryStore()
    far = ill(11, 40)
    write_illness(store, "p", 0, far)
    write_illness(store, "p", 0, TimelineHealth(judged=30, head=30, newest_since=30))
    assert read_illness(store, "p") == IllnessRecord(timelines={0: far}, revision=1)


def test_a_verdict_gets_old() -> None:
    """Epochs sealed for several intervals after a run make its verdict stale; silence does not."""
    assert not is_verdict_stale(0, 1800)
    assert is_verdict_stale(0, 1801)
    assert not is_verdict_stale(0, 1801, 3600)
