"""Divides a cut into the units that tasks read.

The division follows from the cut alone, never from the number of executors: partial aggregates of
the same rows are made of the same parts and merged in the same order on every cluster, so that sums
of doubles are the same bytes.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any, Final

from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import Cut, Slice
from tidegate.jobs.sources.kafka_source import divide_range
from tidegate.jobs.sources.object_decoding import needs_decoding, restore_framing
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.source_spec import SourceSpec
from tidegate.json_types import JsonObject, JsonView

DIVISION: Final = 4
"""Version of the division. Another division gives sums of doubles other last digits.

`MOST_CELLS` belongs to it: a unit with more values is folded in batches.
"""
UNIT_BYTES: Final = 4 << 20
_SHARE_BYTES: Final = 16 << 20
"""What a task reads at most of a larger slice, if that can be divided."""
SHARED: Final = "shared"
"""Says of a part of a unit that other units may read the rest of its object."""
EXTENT: Final = "extent"
"""Of a part of a unit of which not all is decoded: `row` is the number of the first row that is.

`start` and `end` are the bytes from it on, and so many as `header` are before the first row of all.
"""
_MOST_UNITS: Final = 256
"""Shares grow with the cut, so that they are not many more: each has partial aggregates."""
_REQUEST_BYTES: Final = 256 << 10
"""What opening an object counts for."""
_MESSAGE_BYTES: Final = 100
"""What an offset of a topic counts for: a plan does not know the sizes of messages."""


@dataclass(frozen=True)
class ReadUnit:
    """What one task reads: some slices of a cut in its order, whole, or a share of one slice.

    Attributes:
        number: place among the units of the cut.
        indexes: of the slices in the cut.
        pieces: number of each of these slices; shares of one slice have different numbers.
        cut: the slices, each with the parts that the task reads.
        uris: key of an object -> its address (`Store.uri`).
        state: the part of the decider's state before the epoch that is about these slices.
        positions: index of a slice -> position of its first row in the events table, if all planned
            rows leave: the task that reads them writes the events then. None: it keeps the rows.
            Empty: it does neither, because its files would be too small.
    """

    number: int
    indexes: tuple[int, ...]
    pieces: tuple[int, ...]
    cut: Cut
    uris: dict[str, str]
    state: JsonObject
    positions: dict[int, int] | None = None

    def list_slices(self) -> list[tuple[int, Slice]]:
        """Return the slices, each with its index."""
        return list(zip(self.indexes, self.cut.slices, strict=True))

    def count_rows(self) -> Counter[int]:
        """Return index of a slice -> rows that were planned."""
        found = Counter[int]()
        for index, piece in self.list_slices():
            found[index] = sum(part["row_end"] - part["row_start"] for part in piece.parts)
        return found

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


def divide_cut(spec: PipelineSpec, cut: Cut, state: JsonView, store: Store) -> list[ReadUnit]:
    """Return the units of a cut, in its order; slices without rows are in none.

    A unit has about `UNIT_BYTES`, or a single larger slice. Units of at most 16 MiB, or the 256th
    part of the cut, share a slice that is larger than that. A larger row group is not divided, nor
    is an object without breaks that has to be decoded first. Slices with punctuation, barriers or
    `max_jump` are never shared: there a row is judged by the rows before it.

    Args:
        spec: the pipeline.
        cut: what is read.
        state: the decider's state before the epoch.
        store: gives the addresses of objects.
    """
    known: JsonView = state.get("members", {})
    cut = Cut(tuple(_add_extents(spec, piece) for piece in cut.slices))
    filled = [index for index, piece in enumerate(cut.slices) if piece.parts]
    sizes = [sum(map(_measure_part, cut.slices[index].parts)) for index in filled]
    most = max(_SHARE_BYTES, sum(sizes) / _MOST_UNITS)
    units = list[ReadUnit]()
    first = 0
    for group in _group_by_size(sizes, UNIT_BYTES):
        indexes = tuple(filled[place] for place in group)
        shares = [tuple(cut.slices[index] for index in indexes)]
        if sizes[group[0]] > most:
            (whole,) = shares[0]
            source = spec.sources[whole.member.source]
            if is_slice_divisible(source, known.get(str(whole.member))):
                shares = [(share,) for share in _divide_slice(source, whole, most)]
        for slices in shares:
            pieces = tuple(range(first, first + len(slices)))
            units.append(_make_unit(len(units), indexes, pieces, slices, state, store))
            first += len(slices)
    return units


def is_slice_divisible(source: SourceSpec, memory: JsonView | None) -> bool:
    """Whether rows of a slice can be judged without the rows before them.

    `memory` is what the decider's state has of the member. It has a mark if there was punctuation,
    also if the spec has none any more.
    """
    depends = source.punctuation, source.barriers, source.max_jump
    marked = "current" in ((memory or {}).get("generator") or {})
    return all(option is None for option in depends) and not marked


def _divide_slice(source: SourceSpec, whole: Slice, most: float) -> Iterator[Slice]:
    """Yield the shares of a slice, of about so many bytes."""
    parts = [one for part in whole.parts for one in _divide_part(source, part, most)]
    for group in _group_by_size(list(map(_measure_part, parts)), most):
        joined = list[JsonObject]()
        for part in (parts[place] for place in group):
            if joined and joined[-1]["key"] == part["key"]:
                end = {"row_end": part["row_end"]}
                joined[-1] = _add_extent(source, {**joined[-1], **end})
            else:
                joined.append(part)
        yield replace(whole, parts=tuple({**part, "breaks": [], "offsets": []} for part in joined))


def _divide_part(source: SourceSpec, part: JsonObject, most: float) -> Iterator[JsonObject]:
    """Yield an object or a range of a topic in pieces of about so many bytes.

    An object is divided at its breaks (`Footer`), with their offsets if it has to be decoded.
    """
    start, end = part["row_start"], part["row_end"]
    if "kafka" in part:
        pieces = ceil((end - start) * _MESSAGE_BYTES / most)
        yield from divide_range(part, min(pieces, end - start))
        return
    # A slice may have been cut short since it was planned.
    inside = [row for row in part.get("breaks", ()) if start < row < end]
    if needs_decoding(source, part["key"]) and EXTENT not in part:
        inside = []
    shared = {**part, SHARED: bool(inside)}
    for first, last in pairwise([start, *inside, end]):
        yield _add_extent(source, {**shared, "row_start": first, "row_end": last})


def _add_extents(spec: PipelineSpec, piece: Slice) -> Slice:
    found = (_add_extent(spec.sources[piece.member.source], part) for part in piece.parts)
    return replace(piece, parts=tuple(found))


def _add_extent(source: SourceSpec, part: JsonObject) -> JsonObject:
    """Say of an object that has to be decoded which part of it has its rows."""
    offsets = part.get("offsets")
    if not offsets or not needs_decoding(source, part["key"]):
        return part
    begins_with_header = restore_framing(source, part).parse.header
    has_header = {"json": False, "csv": begins_with_header}.get(source.format, True)
    if has_header != (offsets[0] > 0):  # the spec has changed since the object was inspected
        return part
    breaks = part["breaks"]
    first, last = bisect_right(breaks, part["row_start"]) - 1, bisect_left(breaks, part["row_end"])
    end = offsets[last] if last < len(offsets) else part["size"]
    extent = {"row": breaks[first], "header": offsets[0], "start": offsets[first], "end": end}
    return {**part, EXTENT: extent}


def measure_unit(unit: ReadUnit) -> float:
    """Return about how many bytes a unit reads."""
    return sum(_measure_part(part) for piece in unit.cut.slices for part in piece.parts)


def group_by_size(sizes: Sequence[float]) -> list[tuple[int, ...]]:
    """Return the places of things in groups of about `UNIT_BYTES`, in their order.

    A larger thing is alone. Each counts for one request more than its bytes.
    """
    return _group_by_size([size + _REQUEST_BYTES for size in sizes], UNIT_BYTES)


def _group_by_size(sizes: Sequence[float], most: float) -> list[tuple[int, ...]]:
    groups: list[tuple[int, ...]] = []
    total = 0.0
    for place, size in enumerate(sizes):
        if groups and total + size <= most:
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
    if EXTENT in part:
        return float(part[EXTENT]["end"] - part[EXTENT]["start"] + _REQUEST_BYTES)
    return float(part["size"] * rows / max(part["rows"], 1) + _REQUEST_BYTES)


def _describe_part(part: JsonView) -> str:
    if (kafka := part.get("kafka")) is not None:
        return "{topic}/{partition} offsets {from} to {to}".format_map(kafka)
    return f"{part['key']} rows {part['row_start']} to {part['row_end']}"


def _make_unit(
    number: int,
    indexes: tuple[int, ...],
    pieces: tuple[int, ...],
    slices: tuple[Slice, ...],
    state: JsonView,
    store: Store,
) -> ReadUnit:
    known: dict[str, Any] = state.get("members", {})
    own = {str(piece.member): known.get(str(piece.member)) for piece in slices}
    clock = {name: state[name] for name in ("clock", "uncounted") if name in state}
    uris = {part["key"]: store.uri(part["key"]) for piece in slices for part in piece.parts}
    return ReadUnit(number, indexes, pieces, Cut(slices), uris, {**clock, "members": own})
