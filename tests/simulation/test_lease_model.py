"""Two drivers never believe at once that they hold the lease, and each rule of the lease is needed
for that.
"""

from __future__ import annotations

import pytest
from tests.simulation.lease_model import Mends, check, mutants


def test_no_interleaving_gives_two_holders() -> None:
    """Two drivers on hosts whose clocks differ, asleep anywhere, requests that arrive at any time."""
    found = check(Mends())
    assert found.violation is None
    assert found.states > 10_000


@pytest.mark.parametrize(("name", "mends"), list(mutants()))
def test_every_rule_is_needed(name: str, mends: Mends) -> None:
    """Without this rule two drivers hold the lease at once, or a token is given twice."""
    assert check(mends).violation is not None
