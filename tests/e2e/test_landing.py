"""Landing what Spark streams, with kill -9 in the middle.

Every row is in the log once, and the pipeline reads it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

SPEC = """\
apiVersion: tidegate/v1
name: landed
sources:
  ticks:
    path: inbox/ticks/
    schema: {{at: timestamp, n: long}}
    event_time: at
    lag: 0s
    landing: {{format: rate, options: {{rowsPerSecond: "20"}}, columns: {{at: timestamp, n: value}}, every: 500ms}}
  files:
    path: inbox/files/
    schema: {{at: timestamp, n: long}}
    event_time: at
    lag: 0s
    landing:
      format: json
      options: {{path: {folder}, maxFilesPerTrigger: "1"}}
      read_as: at timestamp, n bigint
      every: 200ms
  lines:
    path: inbox/lines/
    schema: {{at: timestamp, n: long}}
    event_time: at
    lag: 0s
    landing:
      format: socket
      options: {{host: 127.0.0.1, port: "{port}", includeTimestamp: "true"}}
      columns: {{at: timestamp, n: CAST(value AS bigint)}}
      every: 200ms
spark: {{driver_memory: 1g, jvm: quick}}
"""


def land(folder: Path, source: str, *options: str, **environment: str) -> subprocess.Popen[bytes]:
    """A landing process."""
    start = "from tidegate.jobs.cli.main import main; main()"
    command = [sys.executable, "-c", start, "land", str(folder / "landed.yaml"), source]
    with (folder / "land.log").open("ab") as log:
        whole = [
            *command,
            "--store",
            str(folder / "store"),
            "--checkpoint",
            str(folder / f"checkpoint-{source}"),
            *options,
        ]
        return subprocess.Popen(
            whole, stdout=log, stderr=log, env={**os.environ, **environment}, cwd=folder
        )


def landed(folder: Path, source: str) -> list[int]:
    """`n` of every landed row, in the order of the log."""
    objects = sorted((folder / "store" / "inbox" / source).glob("*.parquet"))
    return [n for path in objects for n in pq.read_table(path)["n"].to_pylist()]


def wait_for_rows(folder: Path, source: str, rows: int, process: subprocess.Popen[bytes]) -> None:
    """Until so many rows are landed; fails when the process ended before."""
    deadline = time.monotonic() + 900
    while len(landed(folder, source)) < rows:
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail((folder / "land.log").read_text()[-5000:])
        time.sleep(0.02)


# In CI, `test_killed_between_the_object_and_the_commit` kills this query at the worst moment.
@pytest.mark.long
def test_rate_lands_once_through_kills(tmp_path: Path) -> None:
    """A query that is killed as soon as a new object appears, mostly before Spark noted it, leaves
    no gap and no double.
    """
    (tmp_path / "landed.yaml").write_text(SPEC.format(folder=tmp_path / "in", port=1))
    process = land(tmp_path, "ticks")
    wait_for_rows(tmp_path, "ticks", 20, process)
    process.kill()
    process.wait(120)
    process = land(tmp_path, "ticks")
    wait_for_rows(tmp_path, "ticks", len(landed(tmp_path, "ticks")) + 20, process)
    process.terminate()
    assert process.wait(600) == 0, (tmp_path / "land.log").read_text()[-5000:]
    found = landed(tmp_path, "ticks")
    assert sorted(found) == list(range(len(found)))


def test_killed_between_the_object_and_the_commit(tmp_path: Path) -> None:
    """The one moment when bucket and Spark disagree.

    The object is there, Spark runs its batch again, and it lands once.
    """
    (tmp_path / "landed.yaml").write_text(SPEC.format(folder=tmp_path / "in", port=1))
    process = land(tmp_path, "ticks", TIDEGATE_FAULT="land.written:2")
    assert process.wait(900) == -9, (tmp_path / "land.log").read_text()[-5000:]
    objects = sorted((tmp_path / "store" / "inbox" / "ticks").glob("*.parquet"))
    committed = {
        path.name for path in (tmp_path / "checkpoint-ticks" / "spark" / "commits").glob("[0-9]*")
    }
    assert str(int(objects[-1].stem.partition("-")[2])) not in committed
    before = {path: path.read_bytes() for path in objects}
    process = land(tmp_path, "ticks")
    wait_for_rows(tmp_path, "ticks", len(landed(tmp_path, "ticks")) + 20, process)
    process.terminate()
    assert process.wait(600) == 0, (tmp_path / "land.log").read_text()[-5000:]
    assert "landed_before" in (tmp_path / "land.log").read_text()
    assert {path: path.read_bytes() for path in before} == before
    found = landed(tmp_path, "ticks")
    assert sorted(found) == list(range(len(found)))
    assert (
        json.loads(
            (tmp_path / "store" / "inbox" / "ticks" / "_landing" / "status.json").read_text()
        )["state"]
        == "stopped"
    )


def test_a_value_that_no_expression_takes(tmp_path: Path) -> None:
    """It fails the same way every time, so the process ends as poison, says which value, and
    nothing of the batch is written.
    """
    inbox = tmp_path / "in"
    inbox.mkdir()
    spec = SPEC.format(folder=inbox, port=1).replace(
        "read_as: at timestamp, n bigint", "read_as: at timestamp, n string"
    )
    (tmp_path / "landed.yaml").write_text(
        spec.replace('"1"}\n', '"1"}\n      columns: {n: CAST(n AS bigint)}\n')
    )
    (inbox / "a.json").write_text(json.dumps({"at": "2026-03-01T00:00:00Z", "n": "twelve"}))
    process = land(tmp_path, "files")
    assert process.wait(900) == 1, (tmp_path / "land.log").read_text()[-5000:]
    assert "'twelve'" in (tmp_path / "land.log").read_text()[-3000:]
    assert landed(tmp_path, "files") == []
    said = json.loads(
        (tmp_path / "store" / "inbox" / "files" / "_landing" / "status.json").read_text()
    )
    assert (said["state"], "twelve" in said["why"]) == ("failed", True)


def test_files_with_any_names_and_late_uploads(tmp_path: Path) -> None:
    """Files whose names say nothing, and one that sorts before all others and comes last, are each
    landed once.
    """
    inbox = tmp_path / "in"
    inbox.mkdir()
    (tmp_path / "landed.yaml").write_text(SPEC.format(folder=inbox, port=1))
    for place, name in enumerate(("zebra", "mole", "yak")):
        rows = [{"at": "2026-03-01T00:00:00Z", "n": 10 * place + n} for n in range(10)]
        (inbox / f"{name}.json").write_text("\n".join(map(json.dumps, rows)))
    process = land(tmp_path, "files")
    wait_for_rows(tmp_path, "files", 10, process)
    process.kill()
    process.wait(120)
    (inbox / "ant.json").write_text(json.dumps({"at": "2026-03-01T00:00:00Z", "n": 30}))
    process = land(tmp_path, "files")
    wait_for_rows(tmp_path, "files", 31, process)
    process.terminate()
    assert process.wait(600) == 0, (tmp_path / "land.log").read_text()[-5000:]
    assert sorted(landed(tmp_path, "files")) == list(range(31))


# In CI, `tests/driver/test_landing.py` has a socket begin anew behind what was landed. This test
# waits twice for a minute, because lines must not go to a connection that Spark only tries.
@pytest.mark.long
def test_a_socket_keeps_what_was_landed(tmp_path: Path) -> None:
    """What a socket brought is landed as it comes.

    Killed, it goes on with a new connection; what was landed stays, once.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "landed.yaml").write_text(
            SPEC.format(folder=tmp_path, port=server.getsockname()[1])
        )
        for first in (0, 50):
            process = land(tmp_path, "lines")
            server.settimeout(600)
            connection = _talked_to(server)
            connection.sendall(b"".join(b"%d\n" % n for n in range(first, first + 50)))
            wait_for_rows(tmp_path, "lines", first + 50, process)
            if first == 0:
                process.kill()
            else:
                process.terminate()
            code = process.wait(600)
            connection.close()
        assert code == 0, (tmp_path / "land.log").read_text()[-5000:]
    assert sorted(landed(tmp_path, "lines")) == list(range(100)), (
        "Spark deals the lines of a batch out to two tasks"
    )


def _talked_to(server: socket.socket) -> socket.socket:
    """The connection of a reader.

    Spark opens one to see that someone is there and closes it, and another one to read.
    """
    connection, _ = server.accept()
    ready, _, _ = select.select([server, connection], [], [], 60)
    if not ready:  # no one closed it
        return connection
    connection.close()
    return server.accept()[0]
