"""Decider plus reference mover against the event-at-a-time model: random pipelines, worlds and cuts (semantics.md section 9)."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.reference.support import EXAMPLES, Pair, World, worlds

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
AGREE = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=SLOW, print_blob=True)


@AGREE
@given(worlds())
def test_decider_and_model_agree(world: World) -> None:
    """On equal cuts and clocks both give the same rows, windows, late rows, barriers, frontiers and statuses, epoch by epoch."""
    Pair(world).play()
