"""What a pipeline asks of its bucket, as the server counts it: ``python -m tests.bench.requests``.

A real driver on a real MinIO, whose own counters see everything: slots, data, lease, status,
Iceberg's metadata, Spark's reads.

1. **Epochs**: three sources, an object of each in every epoch, one window; from before the first to
    after the last one.
2. **Nothing to read**: the same driver, a minute. Its PUTs in that time, lease and status, are
    taken off the epochs', second by second; its LISTs are those of looking for objects and
    requests, which the turns with rows in them do as well.
"""

from __future__ import annotations

import os
import re
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.e2e.drivers import Piped, wait_for
from tests.e2e.feed import SPEC, write_feed
from tidegate.infra.minio_server import MinioServer, ensure_minio, provision_bucket
from tidegate.infra.provision import REGION, Credentials

_EPOCHS = 24
_QUIET = 60.0
_KINDS = {
    "PUT": ("putobject", "copyobject", "multipart"),
    "LIST": ("listobject",),
    "GET": ("getobject", "headobject"),
}
_UNBOUNDED = SPEC.replace("    bounded: true\n", "").replace(
    "checkpoint: {idle_interval: 100ms}\n", ""
)


class Counted(MinioServer):
    """A MinIO that tells anybody what it was asked."""

    def _build_environment(self) -> dict[str, str]:
        return {**super()._build_environment(), "MINIO_PROMETHEUS_AUTH_TYPE": "public"}

    def counts(self) -> Counter[str]:
        """Requests so far, by API; its own page shows them a few seconds late."""
        time.sleep(15)
        with urllib.request.urlopen(
            f"{self.endpoint}/minio/v2/metrics/cluster", timeout=30
        ) as answer:
            text = answer.read().decode()
        found = re.findall(r'^minio_s3_requests_total\{api="(\w+)".*\} (\d+)', text, re.MULTILINE)
        return Counter({name: int(number) for name, number in found})


def _by_kind(counts: Counter[str]) -> dict[str, int]:
    return {
        kind: sum(n for api, n in counts.items() if any(part in api for part in parts))
        for kind, parts in _KINDS.items()
    }


def main() -> None:
    """Measure and print."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        server, app = (
            Counted(ensure_minio(print), folder / "data", folder / "minio.log"),
            Credentials.generate("app"),
        )
        server.start()
        try:
            provision_bucket(server, "bench", app)
            keys = {
                "ACCESS_KEY": app.access_key,
                "SECRET_KEY": app.secret_key,
                "REGION": REGION,
                "ENDPOINT": server.endpoint,
            }
            os.environ.update({f"TIDEGATE_S3_{name}": value for name, value in keys.items()})
            _measure(server, folder)
        finally:
            server.stop()


def _measure(server: Counted, folder: Path) -> None:
    pipeline = Piped(folder, _UNBOUNDED, "s3://bench")
    driver, store = pipeline.start(), pipeline.store()
    try:
        wait_for(lambda: store.stat("steady/status.json"), driver)
        before, begun = server.counts(), time.monotonic()
        write_feed(folder / "feed", _EPOCHS)
        for path in sorted((folder / "feed").rglob("*.parquet"), key=lambda path: path.name):
            store.put(str(path.relative_to(folder / "feed")), path.read_bytes())
        # Its own log is asked, which costs the bucket nothing.
        wait_for(lambda: f'"epoch": {_EPOCHS},' in pipeline.log_text(), driver)
        while b'"unpublished":0' not in store.get("steady/status.json").data:
            if driver.poll() is not None:
                raise SystemExit(
                    f"the driver ended before it had published all: {pipeline.log_text()[-2000:]}"
                )
            time.sleep(5)  # each look is a request
        middle, worked = server.counts(), time.monotonic()
        time.sleep(_QUIET)
        after, ended = server.counts(), time.monotonic()
    finally:
        driver.terminate()
        driver.wait(timeout=300)
    sealed = pipeline.log().head().slot
    before["putobject"] += 3 * _EPOCHS  # our own
    quiet = {kind: n / (ended - worked) for kind, n in _by_kind(after - middle).items()}
    busy = _by_kind(middle - before)
    epoch = {kind: (busy[kind] - quiet[kind] * (worked - begun)) / sealed for kind in _KINDS}
    sys.stdout.write(f"{sealed} epochs in {worked - begun:.0f} s: {dict(middle - before)}\n")
    sys.stdout.write(f"nothing to read for {ended - worked:.0f} s: {dict(after - middle)}\n")
    for kind in _KINDS:
        month = quiet[kind] * 86_400 * 30 / 1e6
        per_epoch = "" if kind == "LIST" else f"{epoch[kind]:.1f} per epoch, "
        sys.stdout.write(
            f"{kind}: {per_epoch}{quiet[kind]:.2f} per second with nothing to read ({month:.1f}"
            " million a month)\n"
        )


if __name__ == "__main__":
    main()
