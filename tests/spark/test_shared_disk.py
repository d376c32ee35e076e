"""Where reducers run: in tasks that see the driver's scratch folder, or in the driver."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.agreement import spec_of
from tidegate.errors import ConfigurationError
from tidegate.jobs.spark.reducer_tasks import check_shared_disk
from tidegate.jobs.spark.spark_session import SparkSessions
from tidegate.jobs.spec.pipeline import PipelineSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(shutil.which("java") is None, reason="needs a JVM"),
]


class Elsewhere:
    """A Spark whose hosts have another disk."""

    def __init__(self, session: SparkSession, there: Path) -> None:
        self._session, self._there = session, there

    @property
    def read(self) -> Elsewhere:
        return self

    def text(self, path: str) -> object:
        return self._session.read.text(str(self._there / Path(path).name))


def far(**spark: str) -> PipelineSpec:
    """A pipeline whose Spark is elsewhere."""
    spec = spec_of()
    return spec.model_copy(
        update={"spark": spec.spark.model_copy(update={"master": "spark://far:7077", **spark})}
    )


def test_a_spark_without_the_scratch_folder_is_refused(
    session: SparkSession, tmp_path: Path
) -> None:
    """It says what to share. A local Spark, and one with `bucket`, is not asked."""
    assert check_shared_disk(SparkSessions(lambda: session), far(), tmp_path)
    blind: SparkSession = Elsewhere(session, tmp_path / "there")  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="does not see the driver's scratch folder"):
        check_shared_disk(SparkSessions(lambda: blind), far(), tmp_path)
    assert check_shared_disk(SparkSessions(lambda: blind), spec_of(), tmp_path)
    assert not check_shared_disk(SparkSessions(lambda: blind), far(staging="bucket"), tmp_path)
