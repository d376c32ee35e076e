"""Writes the first test case of a spec, from rows that its sources will read."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from tidegate.jobs.engine.arrow_tables import encode_parquet
from tidegate.jobs.sources.object_decoding import decompress_object, read_typed_object

_MOST_ROWS = 20  # of each source: as many as a person reads


def write_first_case(spec_path: Path, objects: Mapping[str, tuple[Path, str]]) -> Path | None:
    """Write `cases/NAME/first.yaml` beside a spec, and the first rows of objects beside it.

    Args:
        spec_path: of the spec.
        objects: source -> one of its objects, and its format.

    Returns:
        The case; None if there is one.
    """
    case = spec_path.parent / "cases" / spec_path.stem / "first.yaml"
    if case.exists():
        return None
    case.parent.mkdir(parents=True, exist_ok=True)
    lines = ["description: The first rows of each source, as `tidegate init` has found them."]
    lines += [f"start: {datetime.now(UTC):%Y-%m-%dT00:00:00Z}", "steps:", "  - rows:"]
    for source, (path, form) in objects.items():
        ending, data = _take_first_rows(path, form)
        (case.parent / f"{source}.{ending}").write_bytes(data)
        lines.append(f"      {source}: {{object: {source}.{ending}}}")
    case.write_text("\n".join([*lines, "  - end", ""]), "utf-8")
    return case


def _take_first_rows(path: Path, form: str) -> tuple[str, bytes]:
    """Return the ending of the name, and the bytes of an object with the first rows."""
    data = decompress_object(path.name, path.read_bytes())
    if form not in ("json", "csv"):
        return "parquet", encode_parquet(read_typed_object(data, form).slice(0, _MOST_ROWS))
    # With the header of CSV, which may have none.
    rows = data.splitlines(keepends=True)[: _MOST_ROWS + 1]
    return ("jsonl" if form == "json" else "csv"), b"".join(rows)
