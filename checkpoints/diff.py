"""What differs between two checkpoints: rows, frontiers, windows, tables, state, sources, spec."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from tidegate.checkpoints.manifest import Counters, FileRef, Manifest

__all__ = ["CheckpointDiff", "DifferingPair", "diff_checkpoints"]


class DifferingPair(BaseModel):
    """One thing on both sides; None where a side does not have it."""

    model_config = ConfigDict(frozen=True)

    left: Any
    right: Any


class CheckpointDiff(BaseModel):
    """Everything that differs, by name. Empty dictionaries mean: equal.

    Attributes:
        same: neither rows, positions, decider, tables nor state differ.
        counters: rows by disposition, right minus left.
        positions: per source partition, where each side stands.
        decider: top-level entries of the decider's state (frontiers, statuses, open barriers) that differ.
        state: live rows per kind of segment.
        tables: rows the two epochs themselves wrote, per table.
    """

    model_config = ConfigDict(frozen=True)

    left: str
    right: str
    same: bool
    spec_changed: bool
    counters: dict[str, int]
    positions: dict[str, DifferingPair]
    decider: dict[str, DifferingPair]
    state: dict[str, DifferingPair]
    tables: dict[str, DifferingPair]


def diff_checkpoints(left: Manifest, right: Manifest) -> CheckpointDiff:
    """Compare two checkpoints of one pipeline."""
    counters = _subtract_counters(_flatten_counters(left.counters), _flatten_counters(right.counters))
    positions = _pair_differences(_extract_positions(left.cut), _extract_positions(right.cut))
    decider = _pair_differences(_flatten_tree(left.decider), _flatten_tree(right.decider))
    state = _pair_differences(_sum_rows_by_kind(left.segments), _sum_rows_by_kind(right.segments))
    tables = _pair_differences(*({table: _sum_file_rows(files) for table, files in side.files.items()} for side in (left, right)))
    return CheckpointDiff(
        left=str(left.id),
        right=str(right.id),
        same=not (counters or positions or decider or state or tables),
        spec_changed=left.spec_digest != right.spec_digest,
        counters=counters,
        positions=positions,
        decider=decider,
        state=state,
        tables=tables,
    )


def _flatten_counters(counters: Counters) -> dict[str, int]:
    plain = {name: value for name, value in dict(counters).items() if isinstance(value, int)}
    return plain | {f"dropped.{reason}": count for reason, count in counters.dropped.items()}


def _subtract_counters(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    names = sorted({*left, *right})
    return {name: change for name in names if (change := right.get(name, 0) - left.get(name, 0))}


def _pair_differences(left: dict[str, Any], right: dict[str, Any]) -> dict[str, DifferingPair]:
    names = sorted({*left, *right})
    return {name: DifferingPair(left=left.get(name), right=right.get(name)) for name in names if left.get(name) != right.get(name)}


def _extract_positions(cut: dict[str, Any]) -> dict[str, Any]:
    """The end of each slice where the cut has one, else the whole entry."""
    return {member: part["end"] if isinstance(part, dict) and "end" in part else part for member, part in cut.items()}


def _flatten_tree(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten_tree(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return flat


def _sum_file_rows(files: list[FileRef]) -> int:
    return sum(file.rows for file in files)


def _sum_rows_by_kind(files: list[FileRef]) -> dict[str, int]:
    kinds = sorted({file.kind for file in files})
    return {kind: _sum_file_rows([file for file in files if file.kind == kind]) for kind in kinds}
