"""Several followers stay right in every interleaving with drivers, a restore, pins and retention,
and each rule is needed.
"""

from __future__ import annotations

import pytest
from tests.simulation.followers_model import Mends, check, mutants


def test_no_interleaving_leaves_a_follower_wrong() -> None:
    """Each holds what its ledger says, none needs what was retired, none is fenced by mistake, a
    pin holds.
    """
    found = check(Mends())
    assert found.violation is None
    assert found.states > 30_000


@pytest.mark.parametrize(("name", "mends"), list(mutants()))
def test_every_rule_is_needed(name: str, mends: Mends) -> None:
    """Without this rule some interleaving does harm."""
    assert check(mends).violation is not None
