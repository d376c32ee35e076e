"""The wheel of the kernel, in an environment that holds it and what it requires, and nothing else."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import Distribution, distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.named_tests import ROOT
from tests.rows.units import WINDOW, order_of, rows_at, slice_of
from tests.spark.agreement import spec_of
from tests.wheels import build_wheel

from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows.cut_division import divide_cut
from tidegate.jobs.rows.stored_partials import StoredTable, decode_table
from tidegate.json_types import read_data_file
from tidegate.time_units import TICK_MIN

pytestmark = pytest.mark.e2e

OFF = {"release": {"mode": "pass_through"}, "outputs": {"events": False}}
IMPORT_ALL = """\
import importlib, pkgutil, sys, tidegate
for name in sys.argv[1:]:
    importlib.import_module(name)
for module in pkgutil.walk_packages(tidegate.__path__, "tidegate."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print("missing", error.name, module.name)
    else:
        print("imported", module.name)
"""
LATE = (
    "boto3",
    "confluent_kafka",
    "croniter",
    "fastavro",
    "google.protobuf.message",
    "psycopg",
    "pyiceberg.table",
    "ruamel.yaml",
    "sqlglot",
)
"""What tasks import inside functions."""
READ_UNIT = """\
import pickle, sys
from tidegate.jobs.rows.batch_reading import read_in_batches
order, unit = pickle.loads(sys.stdin.buffer.read())
*_, last = read_in_batches(order, unit)
sys.stdout.buffer.write(pickle.dumps(last.answer))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of that environment."""
    folder = tmp_path_factory.mktemp("kernel")
    wheel = build_wheel(ROOT / "infra" / "kernel", folder / "dist")
    venv.create(folder / "env", symlinks=True)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    for needed in _follow_requirements(Requirement("tidegate-kernel[kafka,postgres]"), set()):
        if needed.name != "tidegate-kernel":
            _link_files(needed, packages)
    found = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(found), "install", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--quiet", str(wheel)], check=True)
    return found


def _follow_requirements(wanted: Requirement, seen: set[str]) -> Iterator[Distribution]:
    """The distributions of a requirement, in the versions that are installed here."""
    if str(wanted) in seen:
        return
    seen.add(str(wanted))
    found = distribution(wanted.name)
    yield found
    for text in found.requires or ():
        needed = Requirement(text)
        extras = wanted.extras or {""}
        if not needed.marker or any(needed.marker.evaluate({"extra": own}) for own in extras):
            yield from _follow_requirements(needed, seen)


def _link_files(installed: Distribution, folder: Path) -> None:
    """Link each package, module and library; of a namespace such as `google` its own parts."""
    for file in installed.files or ():
        if ".." in file.parts or file.parts[0] == "__pycache__":
            continue
        root = Path(str(installed.locate_file("")))
        source = root / file.parts[0]
        parts = 1 if source.is_file() or (source / "__init__.py").exists() else len(file.parts)
        target = folder.joinpath(*file.parts[:parts])
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_symlink():
            target.symlink_to(root.joinpath(*file.parts[:parts]))


def test_all_of_it_can_be_imported_but_what_spark_brings(python: Path, tmp_path: Path) -> None:
    """Executors have PySpark from Spark; nothing else is missing, and no room of the driver is in
    it.
    """
    done = subprocess.run(
        [python, "-I", "-c", IMPORT_ALL, *LATE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    imported = {line[1] for line in lines if line[0] == "imported"}
    missing = {tuple(line[1:]) for line in lines if line[0] == "missing"}
    assert {"tidegate.jobs.rows.slice_scan", "tidegate.jobs.sinks.iceberg_catalog"} <= imported
    assert {package for package, _ in missing} == {"pyspark"}
    assert {module.rpartition(".")[0] for _, module in missing} == {"tidegate.jobs.spark"}
    rooms = {name.split(".")[2] for name in imported if name.startswith("tidegate.jobs.")}
    assert rooms.isdisjoint({"cases", "cli", "driver", "sealed_queries", "splice"})
    assert not {name for name in imported if name.startswith("tidegate.operators")}


def test_it_folds_a_slice_into_partials_in_the_store(python: Path, tmp_path: Path) -> None:
    """What the body of a task does, sent and answered as Spark does it."""
    store = LocalStore(tmp_path)
    spec = spec_of({"a": {}}, windows={"w": WINDOW}, **OFF)
    cut = Cut((slice_of(store, Member("a"), rows_at(1, 2, 11)),))
    (unit,) = divide_cut(spec, cut, {}, store)
    # Nothing may be sent, so that the task has to write.
    order = replace(order_of(spec, store, TICK_MIN), sent_bytes=0)
    done = subprocess.run(
        [python, "-I", "-c", READ_UNIT],
        input=pickle.dumps((order, unit)),
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    answer = pickle.loads(done.stdout)
    assert (answer.error, answer.left, answer.rows) == (None, None, 3)
    stored = answer.partials["w"]
    assert isinstance(stored, StoredTable)
    folded = decode_table(store.get(stored.key).data)
    assert folded.num_rows == 2


def test_the_contract_of_imports_has_the_modules_of_the_wheel() -> None:
    """`make imports` checks what tasks import inside functions, too."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [one for one in contracts["contracts"] if one["id"] == "wheel"]
    paths = [
        Path(name).with_suffix("") for name in read_data_file("tidegate", "kernel.toml")["files"]
    ]
    apart = {"__init__", "jobs/__init__", "kernel", "py"}
    modules = {f"tidegate.{path}".replace("/", ".") for path in paths if str(path) not in apart}
    assert set(contract["source_modules"]) == modules


def test_both_wheels_have_one_version() -> None:
    """Neither works with another version of the other."""
    needed = [Requirement(text) for text in distribution("tidegate").requires or ()]
    (kernel,) = [one for one in needed if one.name == "tidegate-kernel"]
    assert str(kernel.specifier) == f"=={version('tidegate')}" == f"=={version('tidegate-kernel')}"
