"""`tidegate replay`: which epoch is run again, and with which spec."""

from __future__ import annotations

import pytest
from tests.engine.harness import Bench, row, spec_of

from tidegate.checkpoints.checkpoint_specs import write_spec
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError
from tidegate.jobs.cli.arguments import resolve_slot
from tidegate.jobs.engine.recorded_epochs import find_own_spec


def test_replay_takes_the_spec_that_sealed_the_epoch() -> None:
    """The present spec is used only if it is the same; a spec that was not kept is an error."""
    old, new = spec_of(), spec_of(coalesce={"idle_timeout": "5s"})
    bench = Bench(old)
    bench.sources["a"].append(row(1))
    bench.engine().run_epoch()
    epoch = bench.epochs()[0]
    with pytest.raises(ConfigurationError, match="was not kept") as caught:
        find_own_spec(new, epoch, bench.store)
    assert caught.value.code == "replay.no_spec"
    assert find_own_spec(old, epoch, bench.store) is old
    write_spec(bench.store, old)
    assert find_own_spec(new, epoch, bench.store).digest() == old.digest()


def test_an_epoch_is_named_like_any_checkpoint(log: SlotLog) -> None:
    """By its slot, its id, or the beginning of its id."""
    checkpoint = str(log.head().checkpoint)
    assert [resolve_slot(log, name) for name in ("3", checkpoint, checkpoint[:9])] == [3, 3, 3]
    with pytest.raises(ConfigurationError, match="t0-000009"):
        resolve_slot(log, "t0-000009")
