"""What a Spark session of tidegate leaves on the host."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_a_session_makes_no_folder_where_it_was_started(session: SparkSession) -> None:
    """Spark makes the folder of its warehouse; here it is one that exists."""
    session.sql("select 1").collect()
    (place,) = (
        row.info_value
        for row in session.sql("describe database default").collect()
        if row.info_name == "Location"
    )
    assert Path(urlparse(place).path) == Path(tempfile.gettempdir()).resolve()
