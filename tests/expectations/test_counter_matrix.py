"""Each counter under each preset, on every surface: `make matrices` prints the table."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
from tests.quality_proof import COUNTED, PRESETS, TROUBLES, read_surfaces, start_pipeline


@cache
def play_trouble(preset: str, trouble: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return what has to be counted and what each surface shows; None if it cannot happen."""
    pipeline = start_pipeline(preset, trouble)
    expected = TROUBLES[trouble](pipeline, preset)
    if expected is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Great Expectations warns about its own dependencies
        return {**expected.counts, "late": expected.late}, read_surfaces(pipeline)


@pytest.mark.slow
@pytest.mark.parametrize("counter", [*COUNTED, "late"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_surface_shows_the_same_count(preset: str, counter: str) -> None:
    """In each trouble that the preset can have; a counter that it does not know stays at zero."""
    played = [found for trouble in TROUBLES if (found := play_trouble(preset, trouble))]
    assert len(played) > 1
    nothing: object = {} if counter == "late" else 0
    for expected, surfaces in played:
        shown = {name: counts[counter] for name, counts in surfaces.items() if counter in counts}
        assert len(shown) >= 2
        assert shown == dict.fromkeys(shown, expected.get(counter, nothing))
