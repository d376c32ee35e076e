"""One Spark session for all tests of the run: starting one takes longer than most of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.spark.agreement import spec_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def session() -> Iterator[SparkSession]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tidegate.jobs.spark.session import open_session

        started = open_session(spec_of())
    yield started
    started.stop()
