"""One of the ten incidents; `make incidents` plays all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.browser import needs_chromium
from tests.e2e.incident_recoveries import SPECS
from tests.e2e.incident_scene import scene_of
from tests.e2e.incidents import MAX_CLICKS, play

pytestmark = [pytest.mark.e2e, pytest.mark.slow, needs_chromium, pytest.mark.timeout(1200)]


# In CI, `test_demo.py` kills a driver that Airflow replaces, and `test_browser.py` uses the page.
@pytest.mark.long
def test_a_killed_driver_is_replaced_and_the_page_proves_it(tmp_path: Path) -> None:
    """No click; tables and sink follow, the counts are equal.

    The time is for `make incidents` on a machine without other work.
    """
    with scene_of(tmp_path, {"killed": SPECS["killed"]}) as scene:
        outcome = play(scene, "driver killed")
    assert outcome.trouble == ""
    assert outcome.clicks == 0 <= MAX_CLICKS
    assert len(outcome.proof) == 5
