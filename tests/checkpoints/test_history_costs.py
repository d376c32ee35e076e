"""A look at a long history costs no more requests and no more memory than at a short one.

`make costs` measures more kinds of work, on histories of up to a million epochs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.checkpoints.histories import Cost, History, make_history, refresh_index
from tests.manual_clock import ManualClock
from tests.new_process import call_in_new_process

from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.restore import plan_restore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_index import SLOTS_PER_PAGE

SHORT, LONG = 4 * SLOTS_PER_PAGE, 60 * SLOTS_PER_PAGE
RECENT = 20  # epochs that are not retired


def retire(history: History) -> None:
    """What a driver does every hour, when nothing is to be retired."""
    clock = ManualClock(wall_ticks=history.bench.clock.wall_ticks())
    policy = RetentionPolicy(keep_last=RECENT, keep_for=0, grace=3600)
    log = history.open_log()
    assert not Retention(log, policy, external=tuple, clock=clock, workers=2).run().retired


def list_retained(history: History) -> None:
    """What `tidegate checkpoints list` shows."""
    assert len(CheckpointCatalog(history.open_log()).list_checkpoints()) == RECENT


def plan(history: History) -> None:
    """What the page shows before a restore is asked for."""
    log = history.open_log()
    target = CheckpointCatalog(log).resolve(str(history.recent[-1].id))
    assert plan_restore(log, target).epochs_rewound == 0


def resolve_prefix(history: History) -> None:
    """What a short id on the command line means, when several checkpoints have it."""
    with pytest.raises(Exception, match="it could be"):
        CheckpointCatalog(history.open_log(), workers=2).resolve("t0")


WORK: tuple[Callable[[History], None], ...] = (
    refresh_index,
    retire,
    list_retained,
    plan,
    resolve_prefix,
)


def measure_work() -> list[list[list[Cost]]]:
    """The costs of each work, on a short and on a long history, of two runs."""
    histories = make_history(SHORT, RECENT), make_history(LONG, RECENT)
    return [
        [[history.measure_once(work) for _ in range(2)] for history in histories] for work in WORK
    ]


@pytest.fixture(scope="module")
def costs() -> dict[str, list[list[Cost]]]:
    """The same by the name of the work."""
    names = [work.__name__ for work in WORK]
    return dict(zip(names, call_in_new_process(measure_work), strict=True))


@pytest.mark.parametrize("work", [work.__name__ for work in WORK])
def test_history_does_not_add_to_the_cost(work: str, costs: dict[str, list[list[Cost]]]) -> None:
    """Fifteen times the history costs about the same requests and memory.

    The first run may read all of it once, page by page, to note what is retired.
    """
    (short_first, short), (long_first, long) = costs[work]
    assert short.requests == long.requests
    assert long.memory < 1.3 * short.memory
    assert long_first.memory < 2 * short_first.memory
