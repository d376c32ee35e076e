"""The processes of a run, read from a folder that looks like /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.rows_on_spark.processes import RUN_MARK, TICKS, Family, ProcTable, sum_unseen

JVM = "/usr/bin/java -cp x org.apache.spark.deploy.SparkSubmit pyspark-shell"
EXECUTOR = "/usr/bin/java org.apache.spark.executor.CoarseGrainedExecutorBackend"
DAEMON = "python3 -m pyspark.daemon pyspark.worker"


class FakeProc:
    """A folder with processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "net").mkdir(parents=True)

    def add(
        self,
        pid: int,
        parent: int,
        command: str,
        *,
        mark: str = "",
        seconds: float = 1.0,
        waited: float = 0.0,
        age: int = 0,
    ) -> None:
        """A process; without an age, a greater pid is younger."""
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        ticks = int(seconds * TICKS)
        times = [ticks, 0, int(waited * TICKS), 0]
        fields = ["S", parent, *[0] * 9, *times, *[0] * 4, age or pid * 10]
        (folder / "stat").write_text(f"{pid} (a (b) c) {' '.join(map(str, fields))}")
        (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())
        (folder / "environ").write_bytes(f"A=1\0{RUN_MARK}={mark}\0".encode())

    def connect(self, port: int, listening: int, inode: int, *pids: int) -> None:
        """A connection whose client's end these processes hold."""
        line = f"0: 0100007F:{port:04X} 0100007F:{listening:04X} 01 0:0 0:0 0 0 0 {inode} 1"
        (self.root / "net" / "tcp").write_text(f"heading\n{line}\n")
        for pid in pids:
            (self.root / str(pid) / "fd" / "7").symlink_to(f"socket:[{inode}]")

    def end(self, pid: int) -> None:
        """The process is gone."""
        (self.root / str(pid)).rename(self.root / f"ended-{pid}")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    """A driver (100) with its JVM, and an executor of a cluster, each with workers."""
    found = FakeProc(tmp_path / "proc")
    found.add(1, 0, "init")
    found.add(50, 1, "minio server")
    found.add(100, 1, "python3 -m tidegate.jobs.driver", mark="m")
    found.add(101, 100, JVM, mark="m")
    found.add(102, 101, DAEMON, mark="m")
    found.add(103, 102, DAEMON, mark="m")
    found.add(200, 1, "/usr/bin/java org.apache.spark.deploy.worker.Worker", mark="m")
    found.add(201, 200, EXECUTOR, mark="m")
    found.add(202, 201, DAEMON, mark="m")
    found.add(203, 202, DAEMON, mark="m")
    return found


def open_family(proc: FakeProc) -> Family:
    """The family of the driver, as it is now."""
    family = Family("m", ProcTable(proc.root))
    family.driver = 100
    family.refresh()
    return family


def list_kinds(family: Family) -> dict[int, str]:
    """What each process is."""
    return {one.pid: one.kind for one in family.list_members()}


def test_each_process_of_spark_is_known(proc: FakeProc) -> None:
    """By its command and its ancestors; strangers are left out."""
    assert list_kinds(open_family(proc)) == {
        100: "driver",
        101: "jvm",
        102: "daemon",
        103: "task",
        200: "cluster",
        201: "executor",
        202: "daemon",
        203: "task",
    }


def test_side_processes_are_unknown(proc: FakeProc) -> None:
    """A child and a fork of the driver, a detached one, and one that only calls itself a worker."""
    proc.add(300, 100, "python3 side.py")
    proc.add(301, 100, "python3 -m tidegate.jobs.driver")
    proc.add(302, 1, "python3 detached.py", mark="m")
    proc.add(303, 100, DAEMON)
    kinds = list_kinds(open_family(proc))
    assert {pid: kinds[pid] for pid in range(300, 304)} == dict.fromkeys(range(300, 304), "unknown")


def test_tools_of_the_launcher_are_known(proc: FakeProc) -> None:
    """Scripts start Spark with tools of the shell; a Python below them is none of these."""
    proc.add(300, 100, "bash /x/bin/spark-class org.apache.spark.deploy.SparkSubmit")
    proc.add(301, 300, "dirname /x")
    proc.add(302, 300, "python3 side.py")
    kinds = list_kinds(open_family(proc))
    assert [kinds[pid] for pid in (300, 301, 302)] == ["launcher", "launcher", "unknown"]


def test_a_fork_is_named_after_its_exec(proc: FakeProc) -> None:
    """Before it, it has its parent's command."""
    proc.add(300, 100, "python3 -m tidegate.jobs.driver", seconds=0)
    family = open_family(proc)
    proc.add(300, 100, JVM)
    family.refresh()
    assert list_kinds(family)[300] == "jvm"


def test_a_child_of_ours_is_no_stranger_before_its_exec(proc: FakeProc) -> None:
    """Until then it has our environment, without the mark."""
    family = open_family(proc)
    proc.add(300, os.getpid(), "python3 -m tests.rows_on_spark")
    family.refresh()
    proc.add(300, os.getpid(), "/usr/bin/java org.apache.spark.deploy.master.Master", mark="m")
    family.refresh()
    assert list_kinds(family)[300] == "cluster"


def test_a_parent_is_known_before_its_child(proc: FakeProc) -> None:
    """Although the numbers of processes have begun again between the two."""
    family = open_family(proc)
    proc.add(300, 201, DAEMON, age=3000)
    proc.add(60, 300, DAEMON, age=3001)
    family.refresh()
    assert [list_kinds(family)[pid] for pid in (300, 60)] == ["daemon", "task"]


def test_an_orphan_stays_what_it_was(proc: FakeProc) -> None:
    """The JVM has ended, and its daemon and workers have not noticed yet."""
    family = open_family(proc)
    proc.end(101)
    proc.add(102, 1, DAEMON, mark="m")
    family.refresh()
    kinds = list_kinds(family)
    assert [kinds[pid] for pid in (101, 102, 103)] == ["jvm", "daemon", "task"]


def test_a_worker_that_has_ended_is_known_by_its_daemon(proc: FakeProc) -> None:
    """A zombie has no command; below the driver it is not known."""
    proc.add(300, 102, "")
    proc.add(301, 100, "")
    kinds = list_kinds(open_family(proc))
    assert [kinds[pid] for pid in (300, 301)] == ["task", "unknown"]


def test_only_what_is_below_the_driver_is_subtracted_from_its_time(proc: FakeProc) -> None:
    """The workers of a cluster do not hide what the driver has started."""
    proc.add(100, 1, "python3 -m tidegate.jobs.driver", mark="m", waited=5.0)
    assert sum_unseen(open_family(proc).list_members()) == pytest.approx(2.0)


def test_what_has_ended_is_remembered(proc: FakeProc) -> None:
    """With its processor time."""
    family = open_family(proc)
    proc.end(103)
    family.refresh()
    assert list_kinds(family)[103] == "task"
    assert sum(one.cpu for one in family.list_members() if one.kind == "task") == 2.0


def test_the_youngest_holder_owns_a_socket(proc: FakeProc) -> None:
    """A forked worker shares the sockets of its daemon."""
    proc.connect(4000, 9000, 77, 202, 203)
    owner = open_family(proc).find_owner(4000, 9000)
    assert owner is not None
    assert owner.pid == 203


def test_a_socket_of_no_one(proc: FakeProc) -> None:
    """A connection of a stranger, or of a process that has ended."""
    assert open_family(proc).find_owner(4001, 9000) is None
