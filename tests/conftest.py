"""Shared by every tier.

Give unmarked tests their tier, keep Airflow's home out of the user's, share one MinIO.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.scheduling import name_scope, rank_file
from tests.servers.minio import CertifiedMinio, RealMinio, certified, running

TIERS = ("unit", "minio", "spark", "airflow", "e2e")

# Importing Airflow creates its home folder; doctest collection imports modules of
# tidegate.operators. Two workers, two homes.
_HOME = f"tidegate-tests-airflow-{os.getuid()}-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
os.environ["AIRFLOW_HOME"] = str(Path(tempfile.gettempdir()) / _HOME)
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")

# The same examples in every run: a red test is about the change, not about luck.
# `HYPOTHESIS=search` looks for new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("search", max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give unmarked tests their tier, and put the slowest files first."""
    items.sort(key=lambda item: rank_file(item.nodeid))
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            item.add_marker(pytest.mark.unit)


def pytest_collection_finish() -> None:
    """Spare the collector the half million objects of imported tests, which live to the end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What is frozen is not collected in the end, and DuckDB's library then reports leaks."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `-n`, tests that share servers or sessions run on one worker, in their order.

    With `loadgroup` all others are dealt out one by one, with `loadfile` by files. xdist's own
    groups cannot do it: since pytest 9.2 a node id does not take the group that xdist writes into
    it.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return name_scope(nodeid, by_files=by_files)

    by_files = config.getvalue("dist") == "loadfile"
    if by_files:  # in the order of the collection, or the files with most tests would come first
        config.option.loadscopereorder = False
    return Scheduling(config, log) if by_files or config.getvalue("dist") == "loadgroup" else None


@pytest.fixture(scope="session", autouse=True)
def _without_waiting_for_disks() -> Iterator[None]:
    """Have `os.fsync` only look at its handle: no test of this process cuts the power.

    Tests of the order of writes note its calls. Processes that tests start wait as they do.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session")
def real_minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealMinio]:
    """One MinIO for the whole run."""
    with running(tmp_path_factory.mktemp("minio")) as found:
        yield found


@pytest.fixture
def tls_minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CertifiedMinio]:
    """A MinIO over TLS whose certificate a CA of our own signed."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    with certified(tmp_path_factory.mktemp("tls")) as found:
        yield found


@pytest.fixture
def minio_environment(real_minio: RealMinio, monkeypatch: pytest.MonkeyPatch) -> RealMinio:
    """The shared MinIO, named by the environment, so that `open_store("s3://tidegate/...")` finds
    it.
    """
    for key, value in real_minio.environment().items():
        monkeypatch.setenv(key, value)
    return real_minio
