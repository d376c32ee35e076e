"""A real stream for hours, with kills and outages: does anything that it uses grow?

    python -m tests.e2e.soak_real --minutes 20 --seed 1

A driver, MinIO and three kinds of sinks (files, a webhook and, where it is installed, PostgreSQL) run
with epochs of two seconds. A seeded draw kills MinIO, stops the webhook for a while or lets the
driver sleep, every half minute or two. The driver itself is killed in the first quarter only, so that
the memory of one driver is judged. That quarter is the warm-up (half an hour of two hours). Airflow
is not part of it: `tests/e2e/test_airflow_kills.py` has it.

Every twelve epochs the bucket is maintained, as `tidegate gc` does it, but with a grace of half a
minute instead of an hour, because objects within their grace would look like growth. It is not paced
by time: a slow machine would seal fewer epochs between two rounds, and each would seem to cost more
requests.

Judged are, over the epochs after the warm-up (`tests/bench/slopes.py`):

- memory: resident bytes of the driver and its children;
- objects of the pipeline in the bucket, without its slots, of which every epoch leaves one;
- requests to MinIO for each epoch, all clients together;
- disk: bytes of the pipeline in MinIO's folder, without slots and rows of tables.

`--leak` writes an object for each epoch, which the run must find. Ends with `N of 4 slopes flat`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from tempfile import TemporaryDirectory
from unittest.mock import patch

import psutil

from tests.bench.slopes import Sample, format_verdict, judge_slopes
from tests.e2e.drivers import Steady
from tests.e2e.feed import SOURCES, SPEC
from tests.servers.minio import RealMinio, running
from tests.servers.postgres import PostgresServer
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TidegateError
from tidegate.infra.provision import Credentials
from tidegate.jobs.driver.housekeeping import make_retention
from tidegate.jobs.sinks.table_maintenance import (
    compact_tables,
    delete_orphan_files,
    note_table_versions,
)

_PIPELINE = "steady"
_WARM_UP = 0.25  # of the run
_GRACE = 30.0  # seconds
_MAINTAIN_EVERY = 12  # epochs
_FEED_EVERY = 2.0  # seconds
_OPTIONS = (
    "checkpoint: {min_interval: 2s, idle_interval: 500ms, retain: 30, retain_for: 10s,"
    " maintain_every: never}"
)


@dataclass(frozen=True)
class BucketUsage:
    """What a pipeline has in the bucket, without what every epoch has to leave.

    Attributes:
        objects: without slots.
        bytes: without slots and rows of tables.
    """

    objects: int
    bytes: int


def measure_bucket(folder: Path) -> BucketUsage:
    """Measure a pipeline's folder in MinIO's data, where an object is a folder with `xl.meta`.

    This makes no request. Objects that vanish meanwhile are not counted.
    """
    objects = size = 0
    for place, _, names in os.walk(folder):
        if "xl.meta" not in names or "/slots/" in place:
            continue
        objects += 1
        key = Path(place).relative_to(folder)
        rows = key.suffix == ".parquet" and ("tables" in key.parts or key.parts[0] == "iceberg")
        if not rows:
            parts = (Path(at, name) for at, _, found in os.walk(place) for name in found)
            size += sum(part.stat().st_size for part in parts if part.exists())
    return BucketUsage(objects, size)


class Rounds(threading.Thread):
    """Does something every few seconds until it is ended; a store that is away ends a round only.

    Attributes:
        defect: an error that nothing explains; it ended the rounds, and fails the run.
    """

    def __init__(self, every: float, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._every, self._work, self._over = every, work, threading.Event()
        self.defect: Exception | None = None

    def run(self) -> None:
        """Work."""
        while not self._over.wait(self._every):
            try:
                with suppress(TidegateError, OSError, psutil.Error):
                    self._work()
            except Exception as error:
                self.defect = error
                return

    def end(self) -> None:
        """No further rounds."""
        self._over.set()
        self.join()


class Sampler:
    """Takes samples of a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._before: tuple[int, float] | None = None
        self.samples: list[tuple[float, Sample]] = []

    def take(self) -> None:
        """Take a sample, if epochs were sealed since the last one."""
        before, self._before = self._before, None
        slot, requests = self._stream.log.head().slot, self._stream.count_requests()
        self._before = slot, requests
        # MinIO counts from zero after a kill.
        if before is None or slot <= before[0] or requests <= before[1]:
            return
        usage = measure_bucket(self._stream.data)
        memory = self._stream.measure_memory()
        per_epoch = (requests - before[1]) / (slot - before[0])
        sample = Sample(slot, memory, usage.objects, per_epoch, usage.bytes)
        self.samples.append((time.monotonic(), sample))


class Stream:
    """A driver that is started again when it ends, its feed, and its bucket."""

    def __init__(self, folder: Path, minio: RealMinio, objects: int, spec: str) -> None:
        self.minio = minio
        self.steady = Steady(folder, objects, f"s3://{minio.bucket}", spec=spec)
        self.data = minio.server.data / minio.bucket / _PIPELINE
        self.log, self._store = SlotLog(self.steady.store(), _PIPELINE), self.steady.store()
        self._fed = self._leaked = self._maintained = 0
        self._driver = self.steady.start()

    def keep_running(self) -> None:
        """Start the driver again if it has ended."""
        if self._driver.poll() is not None:
            self._driver = self.steady.start()

    def feed(self) -> None:
        """Put one object of each source."""
        for source in SOURCES:
            name = f"inbox/{source}/{self._fed:05d}.parquet"
            self._store.put(name, (self.steady.inbox / name).read_bytes())
        self._fed += 1

    def leak(self) -> None:
        """Leave an object for each epoch."""
        slot = self.log.head().slot
        for epoch in range(self._leaked + 1, slot + 1):
            self._store.put(f"{_PIPELINE}/staging/leak/{epoch:09d}", b"x" * 4096)
        self._leaked = slot

    def maintain(self) -> None:
        """Do what `tidegate gc` does, with a short grace, if enough epochs were sealed since."""
        spec, slot = self.steady.spec, self.log.head().slot
        if slot < self._maintained + _MAINTAIN_EVERY:
            return
        self._maintained = slot
        compact_tables(spec, self._store)
        grace = note_table_versions(spec, self._store, grace=_GRACE)
        make_retention(spec, self.log, grace=grace).run()
        delete_orphan_files(spec, self._store, grace=grace)

    def measure_memory(self) -> float:
        """Of the driver and its children."""
        driver = psutil.Process(self._driver.pid)
        family = [driver, *driver.children(recursive=True)]
        return sum(process.memory_info().rss for process in family)

    def count_requests(self) -> float:
        """MinIO's own count since its start; it counts again every ten seconds."""
        url = f"{self.minio.server.endpoint}/minio/v2/metrics/cluster"
        headers = {"Authorization": f"Bearer {_sign_token(self.minio.server.root)}"}
        asked = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(asked, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.startswith("minio_s3_requests_total{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def kill_driver(self) -> None:
        """`kill -9`."""
        self._driver.send_signal(SIGKILL)

    def pause_driver(self, seconds: float) -> None:
        """Let the driver sleep, perhaps for longer than its lease lives."""
        self._driver.send_signal(SIGSTOP)
        time.sleep(seconds)
        self._driver.send_signal(SIGCONT)

    def kill_minio(self, seconds: float) -> None:
        """`kill -9`, and a start after an outage."""
        self.minio.server.kill()
        time.sleep(seconds)
        self.minio.server.start()

    def end(self) -> int:
        """Let the driver read the rest and end; return its exit code."""
        for source in SOURCES:
            self._store.put(f"inbox/{source}/_DONE", b"")
        self.keep_running()
        try:
            return self._driver.wait(timeout=600)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            return self._driver.wait()


def _sign_token(root: Credentials) -> str:
    """Return the token that MinIO asks of a reader of its metrics."""
    claims = {"exp": int(time.time()) + 60, "sub": root.access_key, "iss": "prometheus"}
    parts = [json.dumps(part).encode() for part in ({"alg": "HS512", "typ": "JWT"}, claims)]
    signed = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    digest = hmac.new(root.secret_key.encode(), signed, hashlib.sha512).digest()
    return (signed + b"." + base64.urlsafe_b64encode(digest).rstrip(b"=")).decode()


class Receiver:
    """A webhook that takes everything, or refuses for a while."""

    def __init__(self) -> None:
        outer, self.refuses = self, False

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(503 if outer.refuses else 204)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def refuse(self, seconds: float) -> None:
        """Refuse everything for some seconds."""
        self.refuses = True
        time.sleep(seconds)
        self.refuses = False


@contextmanager
def open_sinks(folder: Path, receiver: Receiver) -> Iterator[str]:
    """Start what the sinks write to; the spec's section. PostgreSQL only where it is installed."""
    url = f"http://127.0.0.1:{receiver.server.server_port}/"
    lines = [f"  hook: {{kind: webhook, url: '{url}', tables: [late]}}"]
    lines.append(f"  copies: {{kind: files, path: '{folder / 'copies'}', tables: [late]}}")
    with ExitStack() as opened:
        opened.callback(receiver.server.shutdown)
        if shutil.which("pg_ctl"):
            place = folder / "postgres"
            place.mkdir()
            folder.chmod(0o755)  # the server runs as another user where we are root
            server = PostgresServer(place)
            server.start()
            opened.callback(server.stop)
            lines.append(f"  warehouse: {{kind: postgres, url: '{server.url}', windows: upsert}}")
        yield "sinks:\n" + "\n".join(lines) + "\n"


def attack(stream: Stream, receiver: Receiver, seconds: float, seed: int) -> Counter[str]:
    """Kill and disturb for some seconds; return what was done how often."""
    draw, done = random.Random(seed), Counter[str]()
    began = time.monotonic()
    acts: dict[str, Callable[[], None]] = {
        "minio killed": lambda: stream.kill_minio(draw.uniform(1, 10)),
        "driver asleep": lambda: stream.pause_driver(draw.choice((1.0, 4.0))),
        "webhook away": lambda: receiver.refuse(draw.uniform(5, 20)),
        "driver killed": stream.kill_driver,
    }
    while (passed := time.monotonic() - began) < seconds:
        time.sleep(min(draw.uniform(20, 90), seconds - passed))
        what = draw.choice([*acts] if passed < _WARM_UP * seconds else [*acts][:3])
        acts[what]()
        done[what] += 1
    return done


def run_soak(folder: Path, minutes: float, seed: int, *, leak: bool) -> int:
    """Run, print and judge; return 1 if a slope is not flat."""
    seconds, receiver = 60 * minutes, Receiver()
    text = SPEC.replace("limits: {objects: 1}", "limits: {objects: 8}")
    text = text.replace("checkpoint: {idle_interval: 100ms}", _OPTIONS)
    text = text.replace("spark: {driver_memory: 1g, jvm: quick}\n", "")
    with ExitStack() as opened:
        sinks = opened.enter_context(open_sinks(folder, receiver))
        minio = opened.enter_context(running(folder, "soak"))
        opened.enter_context(patch.dict(os.environ, minio.environment()))
        objects = int(seconds / _FEED_EVERY) + 10
        stream = Stream(folder / "pipeline", minio, objects, text + sinks)
        sampler = Sampler(stream)
        work = [
            Rounds(1.0, stream.keep_running),
            Rounds(_FEED_EVERY, stream.feed),
            Rounds(2.0, stream.maintain),
            Rounds(max(11.0, seconds / 240), sampler.take),
            *([Rounds(2.0, stream.leak)] if leak else []),
        ]
        for thread in work:
            thread.start()
        began = time.monotonic()
        done = attack(stream, receiver, seconds, seed)
        for thread in work:
            thread.end()
        code = stream.end()
        problems = stream.steady.exact().problems
        problems += [repr(thread.defect) for thread in work if thread.defect]
    problems += [f"the driver ended with {code}"] * bool(code)
    return _report(sampler, began + _WARM_UP * seconds, done, problems)


def _report(sampler: Sampler, warm: float, done: Counter[str], problems: list[str]) -> int:
    judged = [(at, sample) for at, sample in sampler.samples if at > warm]
    epochs = judged[-1][1].slot - judged[0][1].slot if judged else 0
    pace = (judged[-1][0] - judged[0][0]) / max(1, epochs) if judged else 0.0
    acts = ", ".join(f"{what} {number} times" for what, number in done.items())
    _say(f"{acts}; {epochs} epochs judged, one every {pace:.1f} s; {len(judged)} samples")
    _say("\n".join(problems) or "every row is in the tables once")
    slopes = judge_slopes([sample for _, sample in judged])
    _say(format_verdict(slopes))
    return int(bool(problems) or not all(slope.is_flat for slope in slopes))


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--leak", action="store_true", help="leave an object for each epoch")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="soak-") as folder:
        return run_soak(Path(folder), given.minutes, given.seed, leak=given.leak)


if __name__ == "__main__":
    sys.exit(main())
