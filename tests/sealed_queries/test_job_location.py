"""Where a launch keeps Spark's checkpoints, and when it goes on in the folder before it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sealed_queries.conftest import JobBench
from tests.sealed_queries.fake_checkpoint import FakeCheckpoint
from tidegate.checkpoints.batch_notes import BatchReport
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.jobs.sealed_queries import job_location
from tidegate.jobs.sealed_queries.job_location import JobLocation, open_location


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_location, "_OWNER_ENDS_WITHIN", 0.0)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until the test ends it."""
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def _note_owner(location: JobLocation, pid: int) -> None:
    owners = [ProcessIdentity.of_process(pid)]
    path = location.folder / job_location._OWNERS_FILE
    path.write_bytes(job_location._OWNERS.dump_json(owners))


def _sealed(bench: JobBench) -> JobBench:
    query, made = bench.query("q")
    made.commit(0)
    bench.sealer.seal(query, 0, BatchReport())
    return bench


def test_the_next_launch_goes_on_after_a_proven_end(
    bench: JobBench, other: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """Also before the first sealed batch: the sink may have a batch that only the folder knows."""
    home = tmp_path / "home"
    first = open_location(home, "uid", bench.log.head(), 1)
    assert first.is_first
    _note_owner(first, other.pid)
    other.kill()
    other.wait()
    made = FakeCheckpoint(first.folder / "q")
    made.plan(0)
    made.write_state(1)
    again = open_location(home, "uid", bench.log.head(), 2)
    again.prepare_query(bench.store, "q")
    assert not (first.folder / "q/state/0/0/1.delta").exists()
    assert (first.folder / "q/offsets/0").exists()
    _note_owner(first, other.pid)
    second = open_location(home, "uid", _sealed(bench).log.head(), 3)
    assert second.folder == first.folder
    assert second.get_sealed_batch("q") == 0


def test_a_job_of_another_store_is_not_gone_on_with(
    bench: JobBench, other: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """Its batches would be sealed into this log: both have one name, and tokens count from 1."""
    home = tmp_path / "home"
    first = open_location(home, "uid", bench.log.head(), 1)
    _note_owner(first, other.pid)
    other.kill()
    other.wait()
    assert open_location(home, "another", bench.log.head(), 2).folder != first.folder


def test_a_driver_that_may_live_keeps_its_folder(
    bench: JobBench, other: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """The next launch gets a folder of its own, made of what is sealed."""
    home = tmp_path / "home"
    first = open_location(home, "uid", bench.log.head(), 1)
    _note_owner(first, other.pid)
    second = open_location(home, "uid", _sealed(bench).log.head(), 2)
    assert second.folder != first.folder
    assert not second.is_first
    _, restored = second.prepare_query(bench.store, "q")
    assert restored is not None
    assert (restored / "offsets/0").exists()


def test_a_launch_elsewhere_in_between_counts(
    bench: JobBench, other: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """The folder here does not know what that launch has written to the sinks."""
    home = tmp_path / "home"
    first = open_location(home, "uid", bench.log.head(), 1)
    _note_owner(first, other.pid)
    other.kill()
    other.wait()
    assert open_location(home, "uid", bench.log.head(), 3).folder != first.folder


def test_a_restore_begins_in_a_new_folder(
    bench: JobBench, other: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """Even by the driver itself, without another holder of the lease."""
    home = tmp_path / "home"
    _sealed(bench)
    first = open_location(home, "uid", bench.log.head(), 1)
    _note_owner(first, other.pid)
    other.kill()
    other.wait()
    plan = plan_restore(bench.log, None)
    commit_restore(bench.log, bench.lease, plan, request_id="r", who="w", why="y")
    second = open_location(home, "uid", bench.log.head(), 2)
    assert second.folder != first.folder
    assert second.get_sealed_batch("q") is None
    _note_owner(second, other.pid)
    assert open_location(home, "uid", bench.log.head(), 3).folder == second.folder


def test_two_launches_at_once_do_not_share_a_folder(
    bench: JobBench, other: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """One that lost its lease while it started Spark has noted itself already."""
    home = tmp_path / "home"
    first = open_location(home, "uid", bench.log.head(), 1)
    _note_owner(first, other.pid)
    other.kill()
    other.wait()
    second = open_location(home, "uid", bench.log.head(), 2)  # this process, which lives
    third = open_location(home, "uid", bench.log.head(), 3)
    assert (second.folder == first.folder, third.folder == second.folder) == (True, False)


def test_old_folders_are_deleted_whatever_the_clock_says(
    bench: JobBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All but the newest, by the token of the lease; without owners none of them is in use."""
    home, made = tmp_path / "home", []
    for token in range(1, 9):
        earlier = time.gmtime(1_800_000_000 - 60 * token)
        monkeypatch.setattr(time, "gmtime", lambda *_, at=earlier: at)
        made.append(open_location(home, "uid", bench.log.head(), token).folder)
        (made[-1] / job_location._OWNERS_FILE).unlink()
    assert [path for path in made if path.exists()] == made[-3:]
