"""Flink and Hazelcast on one machine: their jars, the jobs in ``tests/bench/peers``, and a run.

``python -m tests.bench.jvm_peers`` writes ``peers/jars.sha256`` again, for new versions.

Maven fetches the jars once into the cache folder; those whose checksum differs from the committed
one are refused. javac builds the jobs there as well, before any clock starts.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.servers.jars import ensure_jars
from tidegate.infra.minio_server import locate_cache_folder

_SOURCES: Final = Path(__file__).parent / "peers"
_SUMS: Final = _SOURCES / "jars.sha256"
_CHECKPOINT_MILLIS: Final = 2_000
_HEAP: Final = "-Xmx4g"
_MOST_SECONDS: Final = 900
_FLINK: Final = "2.3.0"
_HADOOP: Final = "3.4.2"


@dataclass(frozen=True)
class JvmPeer:
    """An engine of the JVM.

    Attributes:
        program: its class in ``tests/bench/peers``.
        artifacts: of Maven.
        options: of the JVM.
    """

    program: str
    artifacts: tuple[str, ...]
    options: tuple[str, ...]


JVM_PEERS: Final = {
    "flink": JvmPeer(
        "FlinkPeer",
        (
            *(
                f"org.apache.flink:flink-{name}:{_FLINK}"
                for name in (
                    "streaming-java",
                    "clients",
                    "connector-files",
                    "table-api-java-bridge",
                    "table-planner-loader",
                    "table-runtime",
                    "sql-parquet",
                )
            ),
            # Parquet's reader needs Hadoop's configuration on the class path.
            f"org.apache.hadoop:hadoop-client-api:{_HADOOP}",
            f"org.apache.hadoop:hadoop-client-runtime:{_HADOOP}",
            "org.slf4j:slf4j-nop:1.7.36",
        ),
        tuple(f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in ("util", "lang")),
    ),
    "hazelcast": JvmPeer(
        "HazelcastPeer",
        ("com.hazelcast:hazelcast:5.6.0",),
        (
            "--add-modules=java.se",
            "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
            *(
                f"--add-opens={name}=ALL-UNNAMED"
                for name in (
                    "java.base/java.lang",
                    "java.base/java.nio",
                    "java.base/sun.nio.ch",
                    "java.management/sun.management",
                    "jdk.management/com.sun.management.internal",
                )
            ),
        ),
    ),
}


def _fetch_jars(name: str) -> list[Path]:
    return ensure_jars(f"{name}-peer", JVM_PEERS[name].artifacts)


def _list_sums(name: str) -> list[str]:
    jars = _fetch_jars(name)
    return [f"{hashlib.sha256(jar.read_bytes()).hexdigest()}  {jar.name}" for jar in jars]


@cache
def prepare(name: str) -> tuple[str, ...]:
    """Fetch the jars of a peer, build its job, and return the command without arguments.

    Raises:
        TransientError: Maven is not there, or its registry cannot be reached.
        SystemExit: a jar is not the one whose checksum is committed.
    """
    peer, known = JVM_PEERS[name], set(_SUMS.read_text().splitlines())
    if foreign := [line for line in _list_sums(name) if line not in known]:
        raise SystemExit(f"{name}: these jars are not those of {_SUMS.name}: {foreign}")
    source = _SOURCES / f"{peer.program}.java"
    stamp = hashlib.sha256(source.read_bytes() + _SUMS.read_bytes()).hexdigest()[:16]
    classes = locate_cache_folder() / "peers" / f"{name}-{stamp}"
    path = ":".join(map(str, _fetch_jars(name)))
    if not classes.exists():
        subprocess.run(["javac", "-nowarn", "-cp", path, "-d", classes, source], check=True)
    return ("java", _HEAP, *peer.options, "-cp", f"{classes}:{path}", f"peers.{peer.program}")


def run_peer(name: str, job: str, source: Path, out: Path, log: Any) -> dict[str, Any]:
    """Run a job of `tests.bench.suite`; what it took.

    Args:
        name: of the peer.
        job: name of the job.
        source: the input as `tests.bench.suite.prepare_for_peers` lays it out.
        out: the folder for its files.
        log: an open file for what else it prints.
    """
    command = [*prepare(name), job, str(source), str(out), str(_CHECKPOINT_MILLIS)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=log, check=True, text=True, timeout=_MOST_SECONDS
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    lines = sorted({line for name in JVM_PEERS for line in _list_sums(name)})
    _SUMS.write_text("\n".join(lines) + "\n")
