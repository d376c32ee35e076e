"""Divides a cut into the units that tasks read.

The division follows from the cut alone, never from the number of executors: partial aggregates of
the same rows are made of the same parts and merged in the same order on every cluster, so that sums
of doubles are the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonObject, JsonView

DIVISION: Final = 2
"""Version of the division. Another division gives sums of doubles other last digits.

`MOST_CELLS` belongs to it: a unit with more values is folded in batches.
"""
UNIT_BYTES: Final = 4 << 20
_REQUEST_BYTES: Final = 256 << 10
"""What opening an object counts for."""
_MESSAGE_BYTES: Final = 100
"""What an offset of a topic counts for: a plan does not know the sizes of messages."""


@dataclass(frozen=True)
class ReadUnit:
    """What one task reads: some slices of a cut, whole and in the order of the cut.

    Attributes:
        number: place among the units of the cut.
        indexes: of the slices in the cut.
        cut: the slices.
        uris: key of an object -> its address (`Store.uri`).
        state: the part of the decider's state before the epoch that is about these slices.
    """

    number: int
    indexes: tuple[int, ...]
    cut: Cut
    uris: dict[str, str]
    state: JsonObject

    def count_cells(self, spec: PipelineSpec) -> int:
        """Values that it reads or selects: rows times columns."""
        return sum(
            (part["row_end"] - part["row_start"]) * spec.sources[piece.member.source].width
            for piece in self.cut.slices
            for part in piece.parts
        )

    def describe(self) -> str:
        """Name what is read, for people: at most three objects or ranges of topics."""
        parts = [part for piece in self.cut.slices for part in piece.parts]
        named = ", ".join(map(_describe_part, parts[:3]))
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        return f"{self.cut.slices[0].member}: {named}{more}"


def divide_cut(cut: Cut, state: JsonView, store: Store) -> list[ReadUnit]:
    """Return the units of a cut, in its order; slices without rows are in none.

    A unit has about `UNIT_BYTES`, or a single larger slice: rows are judged by what came before
    them in their slice.
    """
    return [
        _make_unit(number, indexes, cut, state, store)
        for number, indexes in enumerate(_group_slices(cut))
    ]


def measure_unit(unit: ReadUnit) -> float:
    """Return about how many bytes a unit reads."""
    return sum(_measure_part(part) for piece in unit.cut.slices for part in piece.parts)


def _group_slices(cut: Cut) -> list[tuple[int, ...]]:
    filled = [index for index, piece in enumerate(cut.slices) if piece.parts]
    sizes = [sum(map(_measure_part, cut.slices[index].parts)) for index in filled]
    return [tuple(filled[place] for place in group) for group in _group_by_size(sizes)]


def group_by_size(sizes: Sequence[float]) -> list[tuple[int, ...]]:
    """Return the places of things in groups of about `UNIT_BYTES`, in their order.

    A larger thing is alone. Each counts for one request more than its bytes.
    """
    return _group_by_size([size + _REQUEST_BYTES for size in sizes])


def _group_by_size(sizes: Sequence[float]) -> list[tuple[int, ...]]:
    groups: list[tuple[int, ...]] = []
    total = 0.0
    for place, size in enumerate(sizes):
        if groups and total + size <= UNIT_BYTES:
            groups[-1] += (place,)
            total += size
        else:
            groups.append((place,))
            total = size
    return groups


def _measure_part(part: JsonView) -> float:
    rows = part["row_end"] - part["row_start"]
    if "kafka" in part:
        return float(rows * _MESSAGE_BYTES + _REQUEST_BYTES)
    return float(part["size"] * rows / max(part["rows"], 1) + _REQUEST_BYTES)


def _describe_part(part: JsonView) -> str:
    if (kafka := part.get("kafka")) is not None:
        return "{topic}/{partition} offsets {from} to {to}".format_map(kafka)
    return f"{part['key']} rows {part['row_start']} to {part['row_end']}"


def _make_unit(
    number: int, indexes: tuple[int, ...], cut: Cut, state: JsonView, store: Store
) -> ReadUnit:
    slices = tuple(cut.slices[i] for i in indexes)
    known: dict[str, Any] = state.get("members", {})
    own = {str(piece.member): known.get(str(piece.member)) for piece in slices}
    clock = {name: state[name] for name in ("clock", "uncounted") if name in state}
    uris = {part["key"]: store.uri(part["key"]) for piece in slices for part in piece.parts}
    return ReadUnit(number, indexes, Cut(slices), uris, {**clock, "members": own})
