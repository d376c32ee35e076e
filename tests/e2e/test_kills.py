"""kill -9 in each step of the epoch, on real Spark: the tables equal an undisturbed run's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.drivers import SIGKILLED, Piped, Steady
from tests.e2e.feed import SPEC, write_feed
from tidegate.jobs.engine.interfaces import EPOCH_POINTS
from tidegate.jobs.engine.replay import make_content_check

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

OBJECTS = 24


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Steady:
    """The undisturbed run."""
    steady = Steady(tmp_path_factory.mktemp("calm"), OBJECTS)
    assert steady.run() == 0, steady.log_text()
    return steady


def test_the_undisturbed_run_is_exact(calm: Steady) -> None:
    """Every row in one place, windows equal a recomputation (9.1, 9.8)."""
    found = calm.exact()
    assert found.problems == []
    assert sum(source["read"] for source in found.rows.values()) == calm.rows
    assert found.windows["per_minute"] > 40
    log = calm.log()
    for filled in log.iterate_ancestors(log.head().checkpoint):
        assert make_content_check(log.store)(filled.epoch) == []


def killed(steady: Steady, faults: Sequence[str]) -> Steady:
    """Killed at one fault point after the other, then run to the end."""
    for fault in faults:
        assert steady.run(fault) == SIGKILLED, f"{fault}: {steady.log_text()}"
    assert steady.run() == 0, steady.log_text()
    assert steady.exact().problems == []
    return steady


def test_killed_around_the_seal(calm: Steady, tmp_path: Path) -> None:
    """Before, at and behind what decides an epoch, at the seal itself twice in a row.

    The same rows in every table.
    """
    faults = [
        "move.done:2",
        "seal.start:1",
        "seal.sent:1",
        "seal.sent:1",
        "publish.start:2",
    ]
    assert killed(Steady(tmp_path, OBJECTS), faults).content() == calm.content()


# In CI, the test above kills at the points that decide an epoch, and the simulation at all of them.
@pytest.mark.long
def test_killed_in_every_step(calm: Steady, tmp_path: Path) -> None:
    """One kill after another, at each fault point: the same rows in every table."""
    assert (
        killed(Steady(tmp_path, OBJECTS), [f"{point}:2" for point in EPOCH_POINTS]).content()
        == calm.content()
    )


@pytest.mark.long
def test_killed_twice_in_every_step(tmp_path: Path) -> None:
    """Twice in a row at each fault point, then to the end.

    No loss, no duplicate, the same rows in every table.
    """
    calm = Steady(tmp_path / "calm", 36)
    assert calm.run() == 0, calm.log_text()
    faults = [f"{point}:2" for point in EPOCH_POINTS for _ in range(2)]
    assert killed(Steady(tmp_path / "killed", 36), faults).content() == calm.content()


# In CI, `test_outages.py` has a driver that slept fenced off by the next one, and
# `tests/checkpoints/test_races.py` lets two drivers race for the lease.
@pytest.mark.long
def test_two_drivers_started_at_once(calm: Steady, tmp_path: Path) -> None:
    """One takes the lease, the other ends as fenced; the tables are the same."""
    steady = Steady(tmp_path, OBJECTS)
    first, second = steady.start(), steady.start()
    assert sorted([first.wait(timeout=900), second.wait(timeout=900)]) == [0, 4]
    assert steady.content() == calm.content()


# In CI, `test_edges.py` restores by the command, and `test_demo.py` through Airflow.
@pytest.mark.long
def test_restored_by_hand(calm: Steady, tmp_path: Path) -> None:
    """Back to an older checkpoint and forward again.

    Another timeline, the same rows in every table.
    """
    steady = Steady(tmp_path, OBJECTS)
    assert steady.run("", "--epochs", "12") == 0, steady.log_text()
    older = next(f.epoch for f in steady.log().epochs_between(0, 5, 5))
    assert steady.run("", "--recover-to", str(older.id)) == 0, steady.log_text()
    head = steady.log().head()
    assert (head.timeline, [fork.recover_to for fork in steady.log().list_forks()]) == (
        1,
        [str(older.id)],
    )
    assert steady.exact().problems == []
    assert steady.content() == calm.content()


def test_beyond_the_largest_lateness_cuts_do_not_matter(tmp_path: Path) -> None:
    """With a lag beyond the largest lateness no row is late, and other cuts and a kill give the
    same rows (9.3, 9.8).
    """
    whole = SPEC.replace("lag: 30s", "lag: 10m")
    one, three = (
        Piped(tmp_path / "one", whole),
        Piped(tmp_path / "three", whole.replace("objects: 1", "objects: 3")),
    )
    for piped in (one, three):
        write_feed(piped.inbox, 12)
    assert one.run("move.done:3") == SIGKILLED, one.log_text()
    assert one.run() == 0, one.log_text()
    assert three.run() == 0, three.log_text()
    assert one.table("late").num_rows == 0
    assert len(list(three.log().epochs_between(0, 1, 1000))) < len(
        list(one.log().epochs_between(0, 1, 1000))
    )
    assert one.content() == three.content()
