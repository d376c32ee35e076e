"""A Spark on other hosts has to see the driver's scratch folder; one that does not is refused before anything is read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.agreement import spec_of
from tidegate.jobs.spark.session import require_shared_disk
from tidegate.jobs.spec.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.skipif(shutil.which("java") is None, reason="needs a JVM")]


class Elsewhere:
    """A Spark whose hosts have another disk."""

    def __init__(self, session: SparkSession, there: Path) -> None:
        self._session, self._there = session, there

    @property
    def read(self) -> Elsewhere:
        return self

    def text(self, path: str) -> object:
        return self._session.read.text(str(self._there / Path(path).name))


def test_a_spark_without_the_scratch_folder_is_refused(session: SparkSession, tmp_path: Path) -> None:
    """It says what to share; a cluster that sees the folder goes on, and a local Spark is not asked."""
    spec = spec_of()
    cluster = spec.model_copy(update={"spark": spec.spark.model_copy(update={"master": "spark://far:7077"})})
    require_shared_disk(session, cluster, tmp_path)
    far: SparkSession = Elsewhere(session, tmp_path / "there")  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="does not see the driver's scratch folder"):
        require_shared_disk(far, cluster, tmp_path)
    require_shared_disk(far, spec, tmp_path)
