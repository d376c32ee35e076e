"""`tidegate pack`: the environment of executors."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.cli.conftest import Cli

from tidegate.jobs.cli import pack_command
from tidegate.jobs.spark.worker_versions import describe_versions

SPEC = """\
apiVersion: tidegate/v1
name: counted
sources:
  web: {path: inbox/web/, schema: {at: timestamp, item: string}, event_time: at, lag: 0s}
streams:
  out: {schema: {item: string}}
reducers: {seen: {from: events, to: out, function: "visits:count"}}
"""
IMPORTS = """\
import importlib, pkgutil, sys
import tidegate.jobs.rows as kernel
for module in pkgutil.iter_modules(kernel.__path__):
    importlib.import_module(f"tidegate.jobs.rows.{module.name}")
for name in sys.argv[1:]:
    importlib.import_module(name)
print(kernel.__file__)
print(*sorted({"airflow", "great_expectations", "pyspark"} & set(sys.modules)))
from tidegate.jobs.spark.worker_versions import describe_versions
print(describe_versions())
"""
LATE = (
    "boto3",
    "confluent_kafka",
    "fastavro",
    "google.protobuf.message",
    "pyiceberg.table",
    "ruamel.yaml",
    "sqlglot",
)
"""What tasks import inside functions."""


def test_the_kernel_imports_neither_spark_nor_what_runs_beside_the_driver() -> None:
    """An executor without Airflow and Great Expectations can run it."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.splitlines()[1] == ""


def test_the_packages_are_those_that_the_kernel_requires() -> None:
    """In the versions of this environment, extras that are installed here included."""
    packages = pack_command.list_packages()
    assert f"duckdb=={version('duckdb')}" in packages
    assert f"pyiceberg[pyarrow,sql-sqlite]=={version('pyiceberg')}" in packages
    assert f"confluent-kafka=={version('confluent-kafka')}" in packages


def test_the_archive_has_tidegate_and_the_users_modules(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how large it is, and the settings that use it."""
    monkeypatch.setattr(pack_command, "_run_packer", lambda sources, packed: sources.rename(packed))
    (tmp_path / "counted.yaml").write_text(SPEC)
    (tmp_path / "visits.py").write_text("import shared\n\n\ndef count(state, rows): ...\n")
    (tmp_path / "shared.py").write_text("")
    (tmp_path / "unused.py").write_text("")
    said = cli("pack", str(tmp_path / "counted.yaml"), "--out", str(tmp_path / "env.tar.gz"))
    assert said.exit_code == 0, said.err
    assert f"spark.archives: {tmp_path}/env.tar.gz#tidegate-env" in said.out
    assert "spark.pyspark.python: ./tidegate-env/__main__.py" in said.out
    with tarfile.open(tmp_path / "env.tar.gz") as archive:
        names = {name.removeprefix("./") for name in archive.getnames()}
    assert {"visits.py", "shared.py", "tidegate/jobs/rows/slice_scan.py"} <= names
    assert {name.split("/")[1] for name in names if name.startswith("tidegate/")} & {
        "operators",
        "infra",
        "expectations",
    } == set()
    assert "tidegate/jobs/cli" not in names
    assert "unused.py" not in names


def test_an_archive_that_cannot_be_written_leaves_no_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that does not exist is refused before anything is packed."""
    packed: list[Path] = []

    def pack(sources: Path, target: Path) -> None:
        packed.append(target)
        sources.rename(target)

    monkeypatch.setattr(pack_command, "_run_packer", pack)
    (tmp_path / "counted.yaml").write_text(SPEC)
    (tmp_path / "visits.py").write_text("def count(state, rows): ...\n")
    (tmp_path / "taken").mkdir()
    for out in ("missing/env.tar.gz", "taken"):
        assert packed == []
        said = cli("pack", str(tmp_path / "counted.yaml"), "--out", str(tmp_path / out))
        assert (said.exit_code, f"cannot write {tmp_path / out}" in said.err) == (2, True)
    assert packed
    assert list(tmp_path.glob("*.part")) == []


def test_pex_is_asked_for(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "pex", None)
    (tmp_path / "counted.yaml").write_text(SPEC)
    (tmp_path / "visits.py").write_text("def count(state, rows): ...\n")
    said = cli("pack", str(tmp_path / "counted.yaml"))
    assert (said.exit_code, "tidegate[cluster]" in said.err) == (2, True)


# CI runs the tests above: what goes into the archive, and what the kernel imports.
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.long
def test_a_packed_python_runs_the_kernel_by_itself(cli: Cli, tmp_path: Path) -> None:
    """It has all that tasks import, and neither the driver's packages nor Spark; 300 MB at most."""
    demo = Path(__file__).parents[2] / "dags" / "pipelines" / "flights.yaml"
    archive = tmp_path / "flights.tar.gz"
    said = cli("pack", str(demo), "--out", str(archive))
    assert said.exit_code == 0, said.err
    assert archive.stat().st_size <= 300_000_000
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "env", filter="data")
    done = subprocess.run(
        [
            str(tmp_path / "env" / "__main__.py"),
            "-c",
            IMPORTS,
            *LATE,
            "tidegate.jobs.sinks.iceberg_catalog",
        ],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    place, forbidden, versions = done.stdout.splitlines()
    assert place == str(tmp_path / "env" / "tidegate" / "jobs" / "rows" / "__init__.py")
    assert forbidden == ""
    assert versions == describe_versions()
