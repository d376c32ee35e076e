"""The protocol holds in every interleaving of small casts, and each of its mends is needed."""

from __future__ import annotations

import pytest
from tests.simulation.protocol_model import Mends, check, mutants


def test_no_interleaving_breaks_the_protocol() -> None:
    """Two drivers and a restorer, and a driver and two restorers.

    Tens of thousands of states, no violation.
    """
    found = check(Mends())
    assert found.violation is None
    assert found.states > 30_000


@pytest.mark.slow
def test_nor_does_one_more_slot() -> None:
    """With one slot more there are some 300,000 states, and still no violation."""
    found = check(Mends(), last_slot=3)
    assert found.violation is None
    assert found.states > 200_000


@pytest.mark.parametrize(("name", "mends"), list(mutants()))
def test_every_correction_is_needed(name: str, mends: Mends) -> None:
    """Without this mend some interleaving does harm."""
    assert check(mends).violation is not None
