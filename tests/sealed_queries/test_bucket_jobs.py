"""Jobs whose Spark keeps its checkpoints in a real MinIO."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import pytest

from tests.sealed_queries.apps import SCRIPTS, Clicks, Copy
from tests.sealed_queries.jobs_proof import list_checkpoint_jars, prove_combination
from tests.sealed_queries.rig import COMBINATIONS, KilledJob
from tests.servers.minio import RealMinio, running
from tests.servers.spark import can_hide, standalone
from tidegate.errors import TransientError
from tidegate.jobs.sealed_queries.s3a_settings import build_s3a_settings

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1800)]

_FILES = 4


@pytest.fixture
def minio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealMinio]:
    """A MinIO and the jars of S3A, named in the environment."""
    try:
        monkeypatch.setenv("TIDEGATE_SPARK_JARS", list_checkpoint_jars())
    except TransientError as error:
        pytest.skip(f"no registry with Hadoop's S3A: {error.message}")
    with running(tmp_path) as found:
        for key, value in found.environment().items():
            monkeypatch.setenv(key, value)
        yield found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) for name in COMBINATIONS]
)
def test_kills_and_restores_do_not_show_in_the_sinks(
    minio: RealMinio, name: str, tmp_path: Path
) -> None:
    """With the checkpoints in the bucket as with those of a host."""
    counts = prove_combination(
        tmp_path,
        name,
        1,
        1,
        random.Random(name),
        app=Clicks,
        files=_FILES,
        minio=minio,
        location="bucket",
    )
    assert counts == (1, 1, 0)


@pytest.mark.skipif(not can_hide(), reason="this user may not give a process a disk of its own")
def test_executors_without_the_drivers_disk(minio: RealMinio, tmp_path: Path) -> None:
    """A standalone cluster writes the state into the bucket; a kill and a restore do not show."""
    with closing(KilledJob(tmp_path / "whole", {}, Clicks, _FILES)) as whole:
        whole.run_to_end_of_input()
        expected = whole.app.outputs()
    store_url, hidden = f"s3://{minio.bucket}/far", tmp_path / "hidden"
    hidden.mkdir()
    with standalone(tmp_path, 1, hidden=hidden) as cluster:
        conf = {
            "spark.master": cluster.master,
            "spark.cores.max": "2",
            "spark.executor.memory": "1g",
        }
        with closing(
            KilledJob(tmp_path / "far", conf, Clicks, _FILES, store_url, location="bucket")
        ) as job:
            (job.folder / "home").symlink_to(hidden)
            job.launch()
            job.wait(lambda: job.positions().get("per_minute", -1) >= 1)
            job.kill()
            job.run_to_end_of_input()
            assert job.app.outputs() == expected
            job.restore(job.list_targets()[0])
            job.run_to_end_of_input()
            assert job.app.outputs() == expected
            job.read_line()
        assert not list(hidden.rglob("*.delta"))


@pytest.mark.long
def test_a_submitted_job(minio: RealMinio, tmp_path: Path) -> None:
    """spark-submit gets the jars of S3A; a kill does not show."""
    url = f"s3://{minio.bucket}/submitted"
    with closing(KilledJob(tmp_path / "whole", {}, Clicks, _FILES)) as whole:
        whole.run_to_end_of_input()
        expected = whole.app.outputs()
    with closing(KilledJob(tmp_path / "job", {}, Clicks, _FILES, url, location="bucket")) as job:
        for _ in range(2):
            job.launch(submitted=True)
            job.wait(lambda: job.holds_lease() and job.positions().get("per_minute", -1) >= 1)
            job.find_holder().kill()
            assert job.process is not None
            assert job.process.wait(timeout=120) == 137
        job.run_to_end_of_input()
        assert job.app.outputs() == expected


class AtAddress(Copy):
    """A script whose own checkpoint is in the bucket."""

    name = "at_address"
    address: ClassVar[str] = ""

    @property
    def script(self) -> Path:
        return SCRIPTS / "checkpoint_at_address.py"

    def arguments(self) -> list[str]:
        return [*super().arguments(), self.address]


@pytest.mark.long
def test_a_checkpoint_in_the_bucket_is_taken_over(
    minio: RealMinio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script has run by itself on half of the files; the job reads the rest, once."""
    monkeypatch.setattr(AtAddress, "address", f"s3a://{minio.bucket}/own/enriched")
    url = f"s3://{minio.bucket}/store"
    with closing(KilledJob(tmp_path / "job", {}, AtAddress, _FILES, url, location="bucket")) as job:
        inputs = sorted((job.folder / "in").iterdir())
        for file in inputs[_FILES // 2 :]:
            file.rename(job.folder / file.name)
        access = {
            "spark.jars": list_checkpoint_jars(),
            **{f"spark.hadoop.{k}": v for k, v in build_s3a_settings(minio.settings()).items()},
        }
        options = [part for k, v in access.items() for part in ("--conf", f"{k}={v}")]
        subprocess.run(
            [sys.executable, str(job.app.script), *job.app.arguments()],
            env={**os.environ, "PYSPARK_SUBMIT_ARGS": shlex.join([*options, "pyspark-shell"])},
            check=True,
            timeout=300,
        )
        for file in inputs[_FILES // 2 :]:
            (job.folder / file.name).rename(file)
        assert job.launch().wait(timeout=300) == 0
        assert "checkpoint_adopted" in (job.folder / "driver.log").read_text()
        assert job.positions() == {"enriched": _FILES - 1}
        rows = [line for file in inputs for line in file.read_text().splitlines()]
        assert len(job.app.outputs()["enriched"]) == len(rows)
