"""What a request moves, by its key and its range."""

from __future__ import annotations

import pytest

from tests.rows_on_spark.requests import (
    Content,
    Request,
    StorePlace,
    classify_key,
    classify_request,
)

PLACE = StorePlace("bucket", "here", "p", frozenset({"per_key"}))
ATTEMPT = "000001-ab12cd34ef56"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("inbox/s0/1.parquet", "rows"),
        ("inbox/s0/1.json", "rows"),
        ("tidegate-probe/ab12", "other"),
        (f"p/timelines/0/state/{ATTEMPT}/order-00000-ab12cd34ef56.parquet", "rows"),
        (f"p/timelines/0/state/{ATTEMPT}/window-per_key-00000.parquet", "results"),
        (f"p/timelines/0/state/{ATTEMPT}/window-other-00000.parquet", "rows"),
        (f"p/timelines/0/state/{ATTEMPT}/glom-00000-ab12cd34ef56.parquet", "results"),
        (f"p/timelines/0/state/{ATTEMPT}/reducer-per_key.parquet", "rows"),
        (f"p/timelines/0/tables/events/{ATTEMPT}/1.parquet", "rows"),
        (f"p/timelines/0/tables/late/{ATTEMPT}/1.parquet", "rows"),
        (f"p/timelines/0/tables/dead_letters/{ATTEMPT}/1.parquet", "rows"),
        (f"p/timelines/0/tables/dead_letters/{ATTEMPT}/driver.parquet", "other"),
        (f"p/timelines/0/tables/events/{ATTEMPT}/driver.parquet", "rows"),
        (f"p/timelines/0/tables/barriers/{ATTEMPT}/driver.parquet", "other"),
        (f"p/timelines/0/tables/checkpoints/{ATTEMPT}/driver.parquet", "other"),
        (f"p/timelines/0/tables/per_key/{ATTEMPT}/1.parquet", "results"),
        ("p/staging/d/1.parquet", "rows"),
        ("p/timelines/0/slots/9999999998.json", "other"),
        ("p/lease.json", "other"),
        ("p/status.json", "other"),
        ("p/specs/abc.json", "other"),
        ("p/iceberg/events/metadata/1.avro", "other"),
        ("p/iceberg/current.json", "other"),
        ("p/logs/a/1.log", "other"),
    ],
)
def test_an_object_by_its_key(key: str, expected: Content) -> None:
    """Input, segments and files of tables are rows; the log and what describes it are not."""
    assert classify_key(key, PLACE) == expected


@pytest.mark.parametrize(
    ("key", "content_range", "expected"),
    [
        ("inbox/1.parquet", "bytes 2000000-2065535/2065536", "footers"),
        ("inbox/1.parquet", "bytes 0-65535/2065536", "rows"),  # not the end
        ("inbox/1.parquet", "bytes 900000-965535/965536", "rows"),  # a small object
        ("inbox/1.parquet", "bytes 0-2065535/2065536", "rows"),  # the whole object by range
        ("inbox/1.json", "bytes 2000000-2065535/2065536", "rows"),  # has no footer
        ("inbox/1.parquet", "", "rows"),
    ],
)
def test_the_footer_of_a_large_object(key: str, content_range: str, expected: Content) -> None:
    """Only a short range at the end of a large Parquet object is a footer."""
    request = Request(1, "driver", "GET", f"/bucket/here/{key}", 65_536, content_range)
    assert classify_request(request, PLACE) == expected


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/bucket?list-type=2&prefix=here%2Finbox"),
        ("GET", "/bucket/?list-type=2"),
        ("HEAD", "/bucket/here/inbox/1.parquet"),
        ("DELETE", "/bucket/here/inbox/1.parquet"),
        ("POST", "/bucket?delete"),
    ],
)
def test_requests_without_rows(method: str, path: str) -> None:
    """Listing, asking for a size and deleting move no row."""
    assert classify_request(Request(1, "driver", method, path, 500), PLACE) == "other"


def test_a_key_is_unquoted_and_its_version_left_out() -> None:
    """Clients quote what is special in a key."""
    assert PLACE.get_key("/bucket/here/inbox/a%3Db/1.parquet?partNumber=1") == "inbox/a=b/1.parquet"
