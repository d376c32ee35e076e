"""Slices and dead objects in a manifest: read as they were written, and never in part."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tidegate.jobs.engine.interfaces import DeadObject, Slice
from tidegate.jobs.eventtime.decision_types import Member

pytestmark = pytest.mark.unit

MEMBER = Member("web", "a/b")
DEAD = DeadObject(MEMBER, 3, "web/a/b/0003.csv", "etag", 7, "not_parquet", "no magic")


def test_a_slice_is_read_as_it_was_written() -> None:
    """What most slices lack is left out, and comes back as it was."""
    written = Slice(MEMBER, 1, 9, ({"key": "k"},), {"ordinal": 1}, dead=(DEAD,), arrived=5)
    record = written.to_record()
    assert "rows" not in record["dead"][0]
    assert "arrived" not in Slice(MEMBER, 1, 9).to_record()
    assert Slice.from_record(MEMBER, record) == written


@pytest.mark.parametrize("inner", [False, True])
def test_a_field_of_a_newer_version_is_refused(inner: bool) -> None:
    """Dropping it would lose what the newer writer meant."""
    record = Slice(MEMBER, 1, 9, dead=(DEAD,)).to_record()
    (record["dead"][0] if inner else record)["field_of_a_newer_version"] = 1
    with pytest.raises(ValidationError, match="field_of_a_newer_version"):
        Slice.from_record(MEMBER, record)
