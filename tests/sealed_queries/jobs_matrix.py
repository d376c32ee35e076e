"""``make jobs-proof``: each kind of script x each disturbance, with a real Spark.

A cell is one run that is disturbed once, and then compared with an undisturbed run of the same
script. Its outcome is one of these:

- *equal*, or *differs*: the sinks hold the rows of the undisturbed run, or not;
- *broken*: the run did not end as it should, or the disturbance had not the effect that it must
  have;
- *cannot be*: this host cannot do it; the reason is printed;
- *left out*: this run did not ask for it.

The last line is ``N cells, N differences``, with the numbers of the other outcomes if there are any.
The exit code is 0 only if at least one cell ran and all that ran are equal.

All cells take an hour or more. With ``--record FILE`` each outcome is added to a file. A later call
does not run again what was equal on the same commit, and counts it. Calls with other cases may run
side by side.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

import psutil

from tests.sealed_queries.apps import APPS, App
from tests.sealed_queries.case_apps import (
    BadData,
    Cron,
    OddEnds,
    Packaged,
    Sessions,
    TakenOver,
    Timers,
)
from tests.sealed_queries.jobs_proof import compare_outputs
from tests.sealed_queries.rig import COMBINATIONS, KilledJob
from tests.servers.minio import RealMinio, running
from tests.servers.processes import find_jvms, kill_jvms, suspend_without_lock
from tidegate.checkpoints.retention import Retention, RetentionPolicy

_LATE = 3.0
"""Seconds at most from a batch to a disturbance, so that it comes at another moment each time."""
_OUTAGE = 12.0
"""Seconds at most without the store; a lease lasts for 6."""
_PATIENCE = 600.0
_BACK_IN_RUN = 10
"""Seconds by which clocks go back. Spark starts no batch before its clock is where it was."""
_CLOCK = Path(__file__).with_name("shifted_clock.c")


@dataclass(frozen=True)
class Scene:
    """What a disturbance needs: the job, the moment, and what it needs beside the job."""

    job: KilledJob
    dice: random.Random
    back: int  # seconds by which the clock goes back before the next launch
    minio: RealMinio | None = None
    clock: Path | None = None


_Disturbance = Callable[[Scene], None]


def _kill_driver(scene: Scene) -> None:
    scene.job.kill()


def _kill_jvm(scene: Scene) -> None:
    """Kill the JVM alone; the driver must call that a failure that a new launch may repair."""
    process = scene.job.process
    assert process is not None
    assert kill_jvms(process.pid), "the driver had no JVM"
    code = process.wait(timeout=_PATIENCE)
    assert code == 3, f"without its JVM the driver ended with {code}"


def _freeze_python(scene: Scene) -> None:
    """Stop Python alone until another driver has the lease."""
    job, before = scene.job, scene.job.process
    assert before is not None
    python = psutil.Process(before.pid)
    suspend_without_lock(python)
    job.launch()
    job.wait(job.holds_lease)
    python.resume()
    # It finds that the lease is lost, or that its JVM is gone.
    code = before.wait(timeout=_PATIENCE)
    assert code in (3, 4), f"the driver that stood still ended with {code}"


def _take_store_away(scene: Scene) -> None:
    """Kill the store, and start it again; the same driver or a new launch goes on."""
    job, minio = scene.job, scene.minio
    assert minio is not None
    at = job.positions()
    minio.server.kill()
    time.sleep(scene.dice.random() * _OUTAGE)
    minio.server.start()
    job.wait(lambda: job.is_complete() or job.positions() != at)


def _restore_and_collect(scene: Scene) -> None:
    """Go back to the beginning; retention removes what was left before the next launch."""
    job = scene.job
    job.kill()
    job.restore(None)
    policy = RetentionPolicy(keep_last=100, keep_for=0, grace=0)
    Retention(job.log, policy, external=list).run()


def _restore_twice(scene: Scene) -> None:
    """Go back to the first batch, and then to the beginning."""
    job = scene.job
    job.kill()
    job.restore(job.read_line()[0].id)
    job.restore(None)


def _set_clock_back(scene: Scene) -> None:
    """Let the clock of driver and JVM go back a little, and by an hour before the next launch."""
    job, clock, at = scene.job, scene.clock, scene.job.positions()
    assert clock is not None
    _shift_clock(clock, -_BACK_IN_RUN)
    job.wait(lambda: job.is_complete() or job.positions() != at)
    job.kill()
    _shift_clock(clock, -scene.back)


DISTURBANCES: dict[str, _Disturbance] = {
    "kill driver": _kill_driver,
    "kill JVM": _kill_jvm,
    "freeze Python": _freeze_python,
    "store away": _take_store_away,
    "restore and gc": _restore_and_collect,
    "two restores": _restore_twice,
    "clock back": _set_clock_back,
}
_RESTORES = (_restore_and_collect, _restore_twice)


def _shift_clock(clock: Path, seconds: int) -> None:
    """Write in place: the processes have mapped the file."""
    with clock.open("r+b") as file:
        file.write(struct.pack("q", seconds))


def _has_gone_back(job: KilledJob, seconds: int) -> bool:
    """Whether the last line of the driver's log, which has just ended, is about so old."""
    *_, last = re.findall(r'"timestamp": "([^"]+)"', (job.folder / "driver.log").read_text())
    age = time.time() - datetime.fromisoformat(last).timestamp()
    return age > 0.9 * seconds


def _make_clock(folder: Path) -> tuple[Path, dict[str, str]]:
    """The file that shifts the clock, and the environment of processes that follow it."""
    clock, library = folder / "clock", folder / "shifted_clock.so"
    clock.write_bytes(struct.pack("q", 0))
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_CLOCK)]
    subprocess.run(command, check=True)
    return clock, {"SHIFTED_CLOCK": str(clock), "LD_PRELOAD": str(library)}


def _begin(job: KilledJob) -> None:
    """Launch the job, and wait for a batch of each query."""
    job.launch()
    job.wait(lambda: job.holds_lease() and len(job.positions()) == len(job.app.queries))


def _begin_without_tidegate(job: KilledJob) -> None:
    """Let the script run alone for two batches, kill it, and begin."""
    app = job.app
    assert isinstance(app, TakenOver)
    command = [sys.executable, str(app.script), *app.arguments()]
    with (job.folder / "alone.log").open("wb") as log:
        alone = subprocess.Popen(command, stdout=log, stderr=log, cwd=job.folder)
    try:
        deadline = time.monotonic() + _PATIENCE
        while app.find_committed() < 2:
            assert alone.poll() is None, (job.folder / "alone.log").read_text()[-4000:]
            assert time.monotonic() < deadline, "the script alone has ended no two batches"
            time.sleep(0.1)
    finally:
        jvms = find_jvms(alone.pid)
        kill_jvms(alone.pid)
        alone.kill()
        alone.wait()
        psutil.wait_procs(jvms)
    _begin(job)


def _finish_cron(job: KilledJob) -> None:
    """The driver ends by itself; one more launch finds nothing to do."""
    if not job.is_running():
        job.launch()
    _expect_end(job, 0)
    job.launch()
    _expect_end(job, 0)
    assert job.is_complete()


def _meet_bad_data(job: KilledJob) -> None:
    """The job fails, and names the bad value."""
    app = job.app
    assert isinstance(app, BadData)
    app.spoil()
    if not job.is_running():
        job.launch()
    _expect_end(job, 1)
    assert app.is_named_in((job.folder / "driver.log").read_text())


def _begin_with_bad_data(job: KilledJob) -> None:
    """A restore comes when a job fails."""
    _begin(job)
    _meet_bad_data(job)


def _finish_bad_data(job: KilledJob) -> None:
    """The job fails, if need be again, until someone corrects the data."""
    app = job.app
    assert isinstance(app, BadData)
    _meet_bad_data(job)
    app.correct()
    job.files = app.files + 2
    job.run_to_end_of_input()


def _expect_end(job: KilledJob, expected: int) -> None:
    assert job.process is not None
    code = job.process.wait(timeout=_PATIENCE)
    assert code == expected, f"the driver ended with {code}: {job.read_end_of_log()}"


@dataclass(frozen=True)
class Case:
    """A kind of script.

    Attributes:
        app: the application that shows it.
        begin: from nothing to a batch of each query.
        begin_failing: the same before a restore.
        finish: from any state to the end of the input.
        files: how many files its input has.
        state: its state store and the format of its checkpoint.
        back: seconds by which a clock goes back between two launches.
    """

    app: type[App]
    begin: Callable[[KilledJob], None] = _begin
    begin_failing: Callable[[KilledJob], None] | None = None
    finish: Callable[[KilledJob], None] = KilledJob.run_to_end_of_input
    files: int = 4
    state: str = "rocksdb-2"
    back: int = 3600


CASES: dict[str, Case] = {
    "a join of two streams": Case(APPS["join"]),
    # The watermark passes the first two minutes. Iceberg refuses a commit that is more than a
    # minute older than its table.
    "b table": Case(APPS["windows"], files=6, back=40),
    "c foreachBatch upserts": Case(APPS["clicks"]),
    "d state with timers": Case(Timers, files=2),
    "e session windows": Case(Sessions),
    "f arguments and packages": Case(Packaged),
    # Alone it writes the older format, which Spark would not go on with in the newer one.
    "g checkpoint taken over": Case(TakenOver, begin=_begin_without_tidegate, state="hdfs-1"),
    "h ends of scripts": Case(OddEnds),
    "i availableNow": Case(Cron, finish=_finish_cron),
    "j bad data": Case(BadData, begin_failing=_begin_with_bad_data, finish=_finish_bad_data),
}
Cell = tuple[str, str]


@dataclass
class Matrix:
    """The outcomes of cells, and why some cannot be; `record` gets a line for each that runs."""

    outcomes: dict[Cell, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    record: Path | None = None

    def run_case(self, name: str, kinds: Sequence[str], seed: int) -> None:
        """Run the cells of one case, all against the same undisturbed run."""
        case = CASES[name]
        with ExitStack() as resources:
            folder = tempfile.TemporaryDirectory(prefix="jobs-matrix-", ignore_cleanup_errors=True)
            path = Path(resources.enter_context(folder))
            began = time.monotonic()
            try:
                case.app.prepare(path / "server", resources)
                conf = COMBINATIONS[case.state]
                whole = KilledJob(path / "whole", conf, case.app, case.files)
                with closing(whole):
                    case.finish(whole)
                    expected = whole.app.outputs()
                assert all(expected.values()), f"the undisturbed run left nothing: {expected}"
            except Exception:  # the other cases are run nevertheless
                traceback.print_exc()
                self.outcomes |= {(name, kind): "broken" for kind in kinds}
                return
            print(f"{name}, undisturbed: {time.monotonic() - began:.0f} s", flush=True)
            for number, kind in enumerate(kinds):
                dice = random.Random(f"{seed} {name} {kind}")
                began = time.monotonic()
                outcome = self._judge_cell(path / f"cell{number}", name, kind, dice, expected)
                self.outcomes[name, kind] = outcome
                if self.record is not None:
                    with self.record.open("a") as file:
                        file.write("\t".join((_describe_commit(), name, kind, outcome)) + "\n")
                print(f"{name}, {kind}: {outcome}, {time.monotonic() - began:.0f} s", flush=True)

    def _judge_cell(
        self, folder: Path, name: str, kind: str, dice: random.Random, expected: dict[str, object]
    ) -> str:
        if kind == "clock back" and shutil.which("cc") is None:
            self.reasons.append(f"{name}, {kind}: no C compiler (cc) is here")
            return "cannot be"
        try:
            differences = _run_cell(folder, name, kind, dice, expected)
        except Exception:  # the other cells are run nevertheless
            traceback.print_exc()
            return "broken"
        return "differs" if differences else "equal"

    def lines(self) -> Iterator[str]:
        """The table, the reasons, and the totals."""
        yield f"| | {' | '.join(DISTURBANCES)} |"
        yield "|---" * (len(DISTURBANCES) + 1) + "|"
        for name in CASES:
            row = [self.outcomes.get((name, kind), "left out") for kind in DISTURBANCES]
            yield f"| {name} | {' | '.join(row)} |"
        yield from self.reasons
        counts = Counter(self.outcomes.values())
        total = f"{self.ran} cells, {counts['differs']} differences"
        missing = len(CASES) * len(DISTURBANCES) - len(self.outcomes)
        rest = {"broken": counts["broken"], "cannot be": counts["cannot be"], "left out": missing}
        yield total + "".join(f", {number} {what}" for what, number in rest.items() if number)

    @property
    def ran(self) -> int:
        """How many cells ran."""
        return sum(outcome != "cannot be" for outcome in self.outcomes.values())

    @property
    def is_good(self) -> bool:
        """Whether some cells ran and all of them are equal."""
        counts = Counter(self.outcomes.values())
        return 0 < counts["equal"] == self.ran


def _run_cell(
    folder: Path, name: str, kind: str, dice: random.Random, expected: dict[str, object]
) -> int:
    """Return in how many sinks a disturbed run differs from an undisturbed one."""
    case, disturb = CASES[name], DISTURBANCES[kind]
    conf = COMBINATIONS[case.state]
    minio, clock = None, None
    environment, store_url = dict(os.environ), None
    with ExitStack() as resources:
        beside = folder.with_name(f"{folder.name}-beside")
        beside.mkdir()
        if disturb is _take_store_away:
            minio = resources.enter_context(running(beside))
            resources.enter_context(patch.dict(os.environ, minio.environment()))
            environment, store_url = dict(os.environ), f"s3://{minio.bucket}/job"
        if disturb is _set_clock_back:
            clock, more = _make_clock(beside)
            environment |= more
        job = KilledJob(folder, conf, case.app, case.files, store_url, environment)
        resources.enter_context(closing(job))
        is_restore = disturb in _RESTORES
        begin = (case.begin_failing if is_restore else None) or case.begin
        begin(job)
        time.sleep(dice.random() * _LATE)
        disturb(Scene(job, dice, case.back, minio, clock))
        case.finish(job)
        assert clock is None or _has_gone_back(job, case.back), (
            "the driver has not seen the other clock"
        )
        return compare_outputs(f"{name}, {kind}", expected, job)


def _describe_commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def read_equal_cells(record: Path) -> dict[Cell, str]:
    """Return the cells that were equal on this commit."""
    lines = record.read_text().splitlines() if record.exists() else []
    rows = [line.split("\t") for line in lines]
    here = _describe_commit()
    return {
        (name, kind): end for commit, name, kind, end in rows if (commit, end) == (here, "equal")
    }


def run_matrix(chosen: Sequence[Cell], seed: int, record: Path | None = None) -> Matrix:
    """Run the chosen cells that the record does not have, case by case."""
    known = {} if record is None else read_equal_cells(record)
    matrix = Matrix({cell: known[cell] for cell in chosen if cell in known}, record=record)
    for name in CASES:
        kinds = [
            kind
            for kind in DISTURBANCES
            if (name, kind) in chosen and (name, kind) not in matrix.outcomes
        ]
        if kinds:
            matrix.run_case(name, kinds, seed)
    return matrix


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", type=int, default=1, help="run one cell in so many, by the seed")
    parser.add_argument("--cases", nargs="+", choices=[name[0] for name in CASES])
    parser.add_argument("--disturbances", nargs="+", choices=DISTURBANCES)
    parser.add_argument("--record", type=Path, help="goes on where it was broken off")
    return parser.parse_args()


def main() -> int:
    """Run the cells, print the matrix, and return 0 only if some ran and all of them are equal."""
    options = _parse_options()
    names = [name for name in CASES if name[0] in (options.cases or name)]
    cells = [(name, kind) for name in names for kind in options.disturbances or DISTURBANCES]
    dice = random.Random(options.seed)
    matrix = run_matrix(
        dice.sample(cells, -(-len(cells) // options.part)), options.seed, options.record
    )
    print("\n".join(matrix.lines()))
    return int(not matrix.is_good)


if __name__ == "__main__":
    raise SystemExit(main())
