"""Retention holds in every interleaving with drivers, restores and other collectors, and each of
its rules is needed.
"""

from __future__ import annotations

import pytest
from tests.simulation.gc_model import Mends, check, mutants


def test_no_interleaving_deletes_what_is_needed() -> None:
    """Driver, restorer and collector in every interleaving.

    The head is whole, and so is everything not condemned.
    """
    found = check(Mends())
    assert found.violation is None
    assert found.states > 10_000


@pytest.mark.parametrize(("name", "mends"), list(mutants()))
def test_every_rule_is_needed(name: str, mends: Mends) -> None:
    """Without this rule some interleaving retires the head or deletes a file someone needs."""
    assert check(mends).violation is not None
