"""Which checkpoints can be restored after retention: `make matrices` prints the table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.checkpoints.conftest import Author
from tests.checkpoints.hourly_history import HourlyHistory

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.pins import pin_checkpoint
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TidegateError

# What retention did, in hours for which it keeps epochs; None: it did not run.
RETENTION: dict[str, tuple[float | None, ...]] = {
    "none": (None, None),
    "before the restore": (24, None),
    "after the restore": (None, 24),
    "before and after": (24, 24),
    "all but the newest": (0, 0),
}
TARGETS: dict[str, Callable[[list[CheckpointId], list[CheckpointId]], CheckpointId]] = {
    "newest": lambda old, new: new[-1],
    "older, on the lineage": lambda old, new: new[1],
    "before the parting": lambda old, new: old[5],
    "pinned, abandoned": lambda old, new: old[50],
    "middle of the abandoned": lambda old, new: old[40],
    "end of the abandoned": lambda old, new: old[-1],
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("retention", RETENTION)
def test_what_is_offered_can_be_restored(
    retention: str, target: str, log: SlotLog, author: Author
) -> None:
    """A restore succeeds exactly where the list offers it, and the sinks can apply every epoch.

    The newest and the pinned checkpoint are always offered: retention keeps the way to them.
    """
    history = HourlyHistory(log, author)
    before, after = RETENTION[retention]
    old = [epoch.id for epoch in history.seal(60)]
    pin_checkpoint(history.log, "gold", old[50], who="ann")
    pin_checkpoint(history.log, "base", old[9], who="ann")
    if before is not None:
        history.retire(before)
    history.restore(old[9])
    new = [epoch.id for epoch in history.seal(3)]
    if after is not None:
        history.retire(after)
    chosen = TARGETS[target](old, new)
    rows = {row.id: row for row in history.catalog.list_checkpoints(all_timelines=True)}
    offered = str(chosen) in rows and rows[str(chosen)].is_restorable
    if offered:
        parting = history.log.find_parting(chosen)
        history.restore(chosen)
        head = history.log.head()
        epochs = history.log.epochs_between(head.timeline, parting + 1, chosen.slot)
        assert [filled.record.kind for filled in epochs if filled.record.slot > parting] == [
            "epoch"
        ] * max(0, chosen.slot - parting)
    else:
        with pytest.raises(TidegateError):
            history.restore(chosen)
        assert not target.startswith("newest")
    if before is None and target == "pinned, abandoned":
        assert offered
