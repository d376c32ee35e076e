"""What the S3 store sends for a file, and how it reads the answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from botocore.utils import parse_timestamp

from tidegate.checkpoints.s3_store import S3Store, _parse_timestamp


@pytest.mark.minio
def test_a_small_file_goes_up_and_down_in_one_request_each(s3: S3Store, tmp_path: Path) -> None:
    """A HEAD before or after each transfer would make small epochs slower."""
    asked: list[str] = []
    events = s3._get_client().meta.events
    events.register("before-call.s3", lambda model, **_: asked.append(model.name))
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(b"rows")
    s3.upload(source, "f")
    s3.download("f", back)
    assert back.read_bytes() == b"rows"
    assert asked == ["PutObject", "GetObject"]


@pytest.mark.unit
@pytest.mark.parametrize(
    "text",
    [
        "2026-11-27T07:40:50.123Z",
        "2026-11-27T07:40:50Z",
        "Fri, 27 Nov 2026 07:40:50 GMT",
        "1795765250",
        1795765250.5,
    ],
)
def test_times_of_answers_are_parsed_as_botocore_parses_them(text: str | float) -> None:
    """Listings have RFC 3339, headers RFC 7231, and services that give credentials have numbers."""
    assert _parse_timestamp(text) == parse_timestamp(text)


@pytest.mark.minio
def test_large_files_go_up_in_parts(s3: S3Store, tmp_path: Path) -> None:
    """A file above the multipart threshold arrives whole."""
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(os.urandom(1 << 20) * 65)
    written = s3.upload(source, "big")
    s3.download("big", back)
    assert written.size == 65 << 20
    assert back.stat().st_size == 65 << 20
