"""How a cut is divided among tasks."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from tests.rows.topic_inputs import topic_spec
from tests.spark.agreement import spec_of
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.engine.interfaces import Cut, Slice, join_seq
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows.cut_division import ReadUnit, divide_cut
from tidegate.jobs.sources.kafka_source import build_range_key
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonObject, JsonView

MIB = 1 << 20
SHARE = 16 * MIB
SPEC = spec_of({"a": {}, "b": {}})


def draw_parts(draw: random.Random) -> tuple[JsonObject, ...]:
    """Objects of a slice; the first and the last may be read in part."""
    parts = []
    for ordinal in range(draw.randint(1, 6)):
        rows = draw.randint(1, 900_000)
        step = draw.choice([50_000, 200_000, 1_000_000])
        start = 0 if ordinal else draw.randrange(rows)
        breaks = [row for row in range(step, rows, step) if row > start]
        part = {
            "key": f"inbox/a/{ordinal}.parquet",
            "etag": "e",
            "size": draw.choice([9_000, 3 * MIB, 20 * MIB, 90 * MIB]),
            "ordinal": ordinal,
            "rows": rows,
            "row_start": start,
            "row_end": rows,
            "columns": {},
        }
        parts.append(part | ({"breaks": breaks} if breaks else {}))
    return tuple(parts)


def divide(
    folder: Path,
    parts: tuple[JsonObject, ...],
    spec: PipelineSpec = SPEC,
    state: JsonView | None = None,
) -> list[ReadUnit]:
    """The units of a cut whose second slice has these parts."""
    small = {**draw_parts(random.Random(1))[0], "size": 9_000}
    ends = [join_seq(own[-1]["ordinal"], own[-1]["row_end"]) for own in ((small,), parts)]
    slices = Slice(Member("b"), 0, ends[0], (small,)), Slice(Member("a"), 0, ends[1], parts)
    return divide_cut(spec, Cut(slices), state or {}, LocalStore(folder))


def list_ranges(units: list[ReadUnit]) -> list[tuple[str, int, int]]:
    """The objects of the second slice and the rows that are read of them, neighbours joined."""
    found: list[tuple[str, int, int]] = []
    for part in (part for unit in units for part in unit.cut.slices[-1].parts):
        key, start, end = part["key"], part["row_start"], part["row_end"]
        if found and found[-1][0] == key and found[-1][2] == start:
            start = found.pop()[1]
        found.append((key, start, end))
    return found


def measure(part: JsonObject) -> float:
    """Bytes of the rows of an object."""
    rows: int = part["row_end"] - part["row_start"]
    return float(part["size"]) * rows / float(part["rows"])


@pytest.mark.parametrize("seed", range(40))
def test_tasks_share_a_large_slice(tmp_path: Path, seed: int) -> None:
    """Each row is read once, in order, and none reads more than 16 MiB or one row group."""
    parts = draw_parts(random.Random(seed))
    units = divide(tmp_path, parts)
    own = [unit for unit in units if 1 in unit.indexes]
    assert list_ranges(own) == [(p["key"], p["row_start"], p["row_end"]) for p in parts]
    assert [unit.number for unit in units] == list(range(len(units)))
    pieces = [number for unit in units for number in unit.pieces]
    assert pieces == list(range(len(pieces)))
    if sum(map(measure, parts)) <= 4 * MIB:
        assert len(own) == 1
    for unit in own:
        read = unit.cut.slices[-1].parts
        whole = next(p for p in parts if p["key"] == read[0]["key"])
        is_single = len(read) == 1 and not any(
            read[0]["row_start"] < row < read[0]["row_end"] for row in whole.get("breaks", ())
        )
        assert len({part["key"] for part in read}) == len(read)
        assert is_single or sum(map(measure, read)) <= SHARE


def test_a_topic_is_shared_by_its_offsets(tmp_path: Path) -> None:
    """Each share is a range of its own, which a worker fetches."""
    spec = topic_spec("localhost:1")
    place: JsonObject = {
        "topic": "t",
        "partition": 3,
        "from": (7 << 32) - 5,
        "to": (7 << 32) + 400_000,
    }
    part: JsonObject = {
        "key": build_range_key("a", "t", 3, place["from"], place["to"]),
        "etag": "",
        "size": 0,
        "ordinal": 6,
        "rows": 400_005,
        "row_start": (1 << 32) - 5,
        "row_end": (1 << 32) + 400_000,
        "columns": {},
        "kafka": place,
    }
    cut = Cut((Slice(Member("a", "3"), place["from"], place["to"], (part,)),))
    units = divide_cut(spec, cut, {}, LocalStore(tmp_path))
    found = [own for unit in units for own in unit.cut.slices[0].parts]
    assert len(units) == len(found) == 3
    assert found[0]["kafka"]["from"] == place["from"]
    assert found[-1]["kafka"]["to"] == place["to"]
    for first, second in itertools.pairwise(found):
        assert first["kafka"]["to"] == second["kafka"]["from"]
    for own in found:
        start, end = own["kafka"]["from"], own["kafka"]["to"]
        assert own["key"] == build_range_key("a", "t", 3, start, end)
        assert join_seq(own["ordinal"], own["row_start"]) == start
        assert own["row_end"] - own["row_start"] == own["rows"] == end - start


@pytest.mark.parametrize(
    ("options", "memory"),
    [
        ({"max_jump": "5s"}, None),
        ({"barriers": {"kind": "kind", "types": ["stop"]}}, None),
        ({"punctuation": {"every_events": 3, "delay": "1s"}}, None),
        ({}, {"generator": {"current": 5}}),
    ],
)
def test_rows_that_depend_on_the_rows_before_them_are_read_by_one_task(
    tmp_path: Path, options: dict[str, Any], memory: JsonObject | None
) -> None:
    """The state has a mark also if the spec has no punctuation any more."""
    parts = draw_parts(random.Random(5))
    assert sum(map(measure, parts)) > SHARE
    state = {"members": {"a/0": memory}}
    if "punctuation" in options:
        options["lag"] = None
    units = divide(tmp_path, parts, spec_of({"a": options, "b": {}}), state)
    assert sum(1 in unit.indexes for unit in units) == 1
    assert sum(1 in unit.indexes for unit in divide(tmp_path, parts)) > 1


def test_a_very_large_cut_has_a_bounded_number_of_units(tmp_path: Path) -> None:
    """Each unit has partial aggregates, which are merged."""
    example = draw_parts(random.Random(0))[0]
    many = tuple(
        {**example, "key": str(n), "ordinal": n, "row_start": 0, "size": 15 * MIB}
        for n in range(2000)
    )
    assert 200 < len(divide(tmp_path, many)) < 400


def test_an_object_that_has_to_be_decoded_is_read_by_one_task(tmp_path: Path) -> None:
    """It was divided before the spec renamed a column."""
    example = draw_parts(random.Random(0))[0]
    part = {**example, "rows": 900, "row_start": 0, "row_end": 900, "size": 90 * MIB}
    parts = ({**part, "breaks": [300, 600]},)
    assert len(divide(tmp_path, parts)) == 4
    renamed = spec_of({"a": {"evolution": {"renamed": {"m": "n"}}}, "b": {}})
    assert len(divide(tmp_path, parts, renamed)) == 2


def test_a_slice_that_was_cut_short_is_divided_within_its_rows(tmp_path: Path) -> None:
    """A barrier of another source may end it before a break that was planned."""
    example = draw_parts(random.Random(0))[0]
    part = {**example, "rows": 900, "row_start": 350, "row_end": 700, "size": 90 * MIB}
    parts = ({**part, "breaks": [300, 600, 800]},)
    units = divide(tmp_path, parts)
    assert list_ranges(units[1:]) == [(part["key"], 350, 700)]
    read = [one for unit in units[1:] for one in unit.cut.slices[0].parts]
    assert [(one["row_start"], one["row_end"]) for one in read] == [(350, 600), (600, 700)]
