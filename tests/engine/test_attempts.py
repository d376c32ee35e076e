"""Aborted attempts are named in the manifest of the next sealed epoch, each with its id."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tests.engine.harness import Bench, PlainSteps, row, spec_of
from tests.oracle.mover import OracleMover
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import SealUndecidedError, SlotLog
from tidegate.errors import TransientError


@pytest.fixture
def bench() -> Bench:
    found = Bench(spec_of())
    found.sources["a"].append(row(1))
    found.sources["b"].append(row(2))
    return found


def test_a_lost_attempt_and_one_that_was_never_sent_are_recorded_once(bench: Bench) -> None:
    """Both are ABORTED; the epoch after the one that names them names none."""
    first, second = bench.engine(), bench.engine()
    with (
        patch.object(OracleMover, "move", side_effect=TransientError("away", code="x")),
        pytest.raises(TransientError),
    ):
        second.run_epoch()
    assert first.run_epoch().sealed
    assert second.run_epoch().lost
    for at in (3, 5):
        bench.sources["a"].append(row(at))
        second.run_epoch()
    _, names, none = bench.epochs()
    aborted = names.notes["aborted"]
    assert [name.rpartition("-")[0] for name in aborted] == ["t0-000001", "t0-000001"]
    assert len(set(aborted)) == 2
    assert "aborted" not in none.notes


def test_an_attempt_whose_put_was_sent_is_not_aborted_by_an_error(bench: Bench) -> None:
    """Its slot decides: here it holds the attempt."""
    engine, seal = bench.engine(), SlotLog.seal

    def undecided(log: SlotLog, record: Manifest) -> None:
        seal(log, record)
        raise SealUndecidedError("no one answered", code="log.seal_undecided")

    with patch.object(SlotLog, "seal", undecided), pytest.raises(SealUndecidedError):
        engine.run_epoch()
    engine.reload()
    bench.sources["a"].append(row(3))
    assert engine.run_epoch().sealed
    assert all("aborted" not in epoch.notes for epoch in bench.epochs())


def test_the_log_names_the_attempt_from_its_beginning(bench: Bench) -> None:
    """The driver's steps learn of slot and attempt before anything is moved."""
    begun: list[tuple[int, str]] = []
    steps = PlainSteps(bench.clock)
    steps.begin_attempt = lambda epoch, name: begun.append((epoch, name))  # type: ignore[method-assign]
    bench.engine(steps=steps).run_epoch()
    (epoch,) = bench.epochs()
    assert begun == [(epoch.slot, epoch.attempt)]
