"""``python -m tests.e2e.chaos --kills 50``.

Kills at random moments on real MinIO and Spark; the tables must not show any of it.

A bounded feed with fixed cuts is driven to its end while the driver, its JVM and MinIO are killed
and the driver is put to sleep. A supervisor starts ended drivers again. At the end every table must
hold the rows of an undisturbed run, and the rules of the protocol must be able to take every step
that the bucket has kept (`tests/e2e/real_trace.py`).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from statistics import median

from tests.e2e.drivers import Steady
from tests.e2e.feed import SPEC
from tests.e2e.real_trace import judge_bucket, keep_versions
from tests.servers.minio import RealMinio, running
from tests.servers.processes import kill_jvms
from tests.simulation.protocol_trace import UntakenError
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TidegateError

PACED = SPEC.replace("checkpoint: {", "checkpoint: {min_interval: 500ms, ")
BUCKET = "chaos"
_PATIENCE = 300.0  # seconds for one epoch: a machine may be busy
_EPOCHS_PER_KILL = (
    4  # an epoch is ended by an attack within two seconds; what is left runs undisturbed
)
_SLOWEST = 10.0  # seconds an undisturbed epoch may take on a busy machine


@dataclass
class Outcome:
    """What was done and what came of it.

    Attributes:
        gaps: seconds from an attack to the next sealed epoch, by kind of attack.
        problems: what the independent check says, tables that differ, and a step that the protocol
            does not allow; empty means exact.
        steps: of the protocol, that were taken.
    """

    gaps: dict[str, list[float]] = field(default_factory=dict)
    launches: int = 0
    epochs: int = 0
    steps: int = 0
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        """For people."""
        rows = [f"{'attack':<12} {'times':>5} {'median s':>9} {'max s':>7}"]
        every = [gap for own in self.gaps.values() for gap in own]
        for kind, gaps in [*sorted(self.gaps.items()), ("all", every)]:
            rows.append(f"{kind:<12} {len(gaps):>5} {median(gaps):>9.1f} {max(gaps):>7.1f}")
        verdict = (
            f"the tables equal the undisturbed run's; {self.steps} steps, all taken"
            if not self.problems
            else "; ".join(self.problems[:5])
        )
        return "\n".join([*rows, f"{self.epochs} epochs, {self.launches} drivers; {verdict}"])


class Chaos:
    """One disturbed run."""

    def __init__(self, steady: Steady, minio: RealMinio, seed: int) -> None:
        self._steady, self._server, self._dice = steady, minio.server, random.Random(seed)
        self._environment = minio.environment()
        self._log = SlotLog(steady.store(), "steady")
        self._driver = steady.start(environment=self._environment)
        self._attacks: list[tuple[str, int]] = []

    def run(self, kills: int) -> Outcome:
        """Attack, wait for the next epoch, attack again; then let it finish."""
        kinds: list[tuple[str, Callable[[], None]]] = [
            ("driver", self._kill_driver),
            ("jvm", self._kill_jvm),
            ("minio", self._kill_minio),
            ("pause", self._pause),
        ]
        try:
            self._wait(lambda: self._slot() >= 2)
            for number in range(kills):
                time.sleep(self._dice.uniform(0.0, 2.0))
                name, attack = kinds[number % 4]
                before = self._slot()
                self._attacks.append((name, time.time_ns() // 1000))
                attack()
                self._wait(lambda before=before: self._slot() > before)  # type: ignore[misc]
            self._wait(lambda: self._driver.poll() == 0)
        finally:
            self._driver.kill()
            self._driver.wait()
        return self._outcome()

    def _wait(self, true: Callable[[], bool]) -> None:
        """Supervise until something is true; patience begins again with every epoch."""
        deadline, newest = time.monotonic() + _PATIENCE, self._slot()
        while not true():
            if self._slot() > newest:
                deadline, newest = time.monotonic() + _PATIENCE, self._slot()
            if self._driver.poll() not in (None, 0):
                self._driver = self._steady.start(environment=self._environment)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no progress in {_PATIENCE:.0f} s: {self._steady.log_text()}")
            time.sleep(0.1)

    def _slot(self) -> int:
        try:
            return self._log.head().slot
        except TidegateError:
            return 0

    def _kill_driver(self) -> None:
        self._driver.send_signal(SIGKILL)

    def _kill_jvm(self) -> None:
        """The driver itself where its outputs need no JVM."""
        if not kill_jvms(self._driver.pid):
            self._kill_driver()

    def _kill_minio(self) -> None:
        self._server.kill()
        time.sleep(self._dice.uniform(0.2, 2.0))
        self._server.start()

    def _pause(self) -> None:
        """Sometimes for longer than the lease lives."""
        self._driver.send_signal(SIGSTOP)
        time.sleep(self._dice.choice((0.5, 2.0, 8.0)))
        self._driver.send_signal(SIGCONT)

    def _outcome(self) -> Outcome:
        head = self._log.head()
        sealed = sorted(
            f.epoch.created_at for f in self._log.epochs_between(head.timeline, 1, head.slot)
        )
        outcome = Outcome(launches=self._steady.launches, epochs=head.slot)
        for kind, at in self._attacks:
            after = next((moment for moment in sealed if moment > at), None)
            if after is not None:
                outcome.gaps.setdefault(kind, []).append((after - at) / 1e6)
        return outcome


def feed_bucket(steady: Steady) -> None:
    """Put the inbox into the bucket."""
    store = steady.store()
    for path in sorted((steady.inbox / "inbox").rglob("*")):
        if path.is_file():
            store.put(str(path.relative_to(steady.inbox)), path.read_bytes())


def chaos(folder: Path, minio: RealMinio, kills: int, seed: int) -> Outcome:
    """The undisturbed run on a folder, the disturbed one on MinIO, and the comparison.

    The environment has MinIO's address.
    """
    objects = _EPOCHS_PER_KILL * kills + 4
    calm = Steady(folder / "calm", objects, spec=PACED.replace("min_interval: 500ms, ", ""))
    if calm.start().wait(timeout=60 + _SLOWEST * objects) != 0:
        raise RuntimeError(calm.log_text())
    steady = Steady(folder / "chaos", objects, f"s3://{minio.bucket}/{seed}", spec=PACED)
    feed_bucket(steady)
    keep_versions(minio)
    outcome = Chaos(steady, minio, seed).run(kills)
    try:
        outcome.steps = judge_bucket(minio, f"{seed}/", steady.spec.name)
    except UntakenError as error:
        outcome.problems.append(str(error))
    outcome.problems += steady.exact().problems
    wanted, found = calm.content(), steady.content()
    for table, rows in wanted.items():
        missing, extra = (
            Counter(rows) - Counter(found[table]),
            Counter(found[table]) - Counter(rows),
        )
        if missing or extra:
            outcome.problems.append(
                f"{table}: {missing.total()} rows missing, {extra.total()} too many"
            )
    return outcome


def run_chaos(kills: int, seed: int) -> Outcome:
    """Run on a MinIO of its own, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="tidegate-chaos-") as name:
        folder = Path(name)
        with running(folder, BUCKET) as minio:
            os.environ.update(minio.environment())
            return chaos(folder, minio, kills, seed)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    outcome = run_chaos(given.kills, given.seed)
    print(outcome.text())  # noqa: T201
    return int(bool(outcome.problems))


if __name__ == "__main__":
    sys.exit(main())
