"""Jars that are not part of pyspark, fetched once by Maven into the cache folder.

For tests, benches and trying things out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

from tidegate.errors import TransientError
from tidegate.infra.minio_server import locate_cache_folder
from tidegate.jobs.spec.operations import JARS

BROKER: Final = ("org.apache.kafka:kafka_2.13:4.3.1",)
CONNECTOR: Final = (*JARS["kafka"],)
_NOT_WITH_THEM: Final = (
    "org.apache.spark:*",
    "org.apache.hadoop:*",
    "org.wildfly.openssl:*",
    "software.amazon.awssdk:bundle",
)
_VERSION: Final = re.compile(r"-\d.*\.jar$")
_FETCH_SECONDS: Final = 420


def ensure_jars(name: str, artifacts: tuple[str, ...], digest: str = "") -> list[Path]:
    """The jars of some artifacts and of all they need, fetched by Maven unless they are in the
    cache.

    Args:
        name: of their folder in the cache.
        artifacts: as `group:name:version`.
        digest: what `hash_jars` gives for them; empty to take what Maven has checked.

    Raises:
        TransientError: Maven is not there, or its registry cannot be reached.
        ValueError: the jars are not those of `digest`; they are not kept.
    """
    folder = locate_cache_folder() / "jars" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(mkdtemp(prefix=".fetch-", dir=folder.parent))
        try:
            (work / "pom.xml").write_text(_pom(artifacts))
            _maven(work)
            if digest and hash_jars(work / "jars") != digest:
                raise ValueError(f"the jars of {name} are not those whose SHA-256 is {digest}")
            (work / "jars").replace(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return sorted(folder.glob("*.jar"))


def hash_jars(folder: Path) -> str:
    """One SHA-256 over the names and contents of a folder's jars."""
    whole = sha256()
    for jar in sorted(folder.glob("*.jar")):
        whole.update(f"{sha256(jar.read_bytes()).hexdigest()}  {jar.name}\n".encode())
    return whole.hexdigest()


def spark_jars(name: str, artifacts: tuple[str, ...]) -> list[Path]:
    """The same for a Spark, which gets only what pyspark does not bring in a version of its own.

    Raises:
        TransientError: as for `ensure_jars`.
    """
    spark = find_spec("pyspark")
    places = spark.submodule_search_locations or [] if spark else []
    theirs = {
        _VERSION.sub("", jar.name) for place in places for jar in Path(place, "jars").glob("*.jar")
    }
    return [jar for jar in ensure_jars(name, artifacts) if _VERSION.sub("", jar.name) not in theirs]


def _pom(artifacts: tuple[str, ...]) -> str:
    pairs = (artifact.split(":") for artifact in _NOT_WITH_THEM)
    left_out = "".join(
        f"<exclusion><groupId>{g}</groupId><artifactId>{a}</artifactId></exclusion>"
        for g, a in pairs
    )
    dependencies = ""
    for artifact in artifacts:
        group, name, version, *classifier = artifact.split(":")
        place = (
            f"<groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version>"
        )
        place += "".join(f"<classifier>{kind}</classifier>" for kind in classifier)
        own = (
            f"<exclusions>{left_out}</exclusions>"
            if group in ("org.apache.spark", "org.apache.hadoop")
            else ""
        )
        dependencies += f"<dependency>{place}{own}</dependency>"
    head = "<modelVersion>4.0.0</modelVersion><groupId>tidegate</groupId><artifactId>fetch</artifactId><version>1</version>"
    return f"<project>{head}<dependencies>{dependencies}</dependencies></project>"


def _maven(work: Path) -> None:
    command = [
        "mvn",
        "-q",
        "-B",
        "dependency:copy-dependencies",
        f"-DoutputDirectory={work / 'jars'}",
    ]
    try:
        done = subprocess.run(
            command, cwd=work, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False
        )
    except FileNotFoundError:
        raise TransientError(
            "Maven is not installed", code="infra.no_maven", advice="sudo apt-get install -y maven"
        ) from None
    except subprocess.TimeoutExpired:
        raise TransientError(
            "Maven did not finish in time", code="infra.maven", advice="try again"
        ) from None
    if done.returncode:
        said = next(
            (line for line in done.stdout.splitlines() if "ERROR" in line), "no reason given"
        )
        raise TransientError(
            f"Maven could not fetch the jars: {said[:300]}",
            code="infra.maven",
            advice="check the network",
        )
