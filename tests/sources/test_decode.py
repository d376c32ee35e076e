"""Other formats read as Parquet: values, bad rows, bad objects, changed columns."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracle.rows import RawRow
from tests.sources.encoded_objects import (
    AVRO_SYNC,
    ROWS,
    START,
    TICK,
    WHOLE,
    avro,
    csv,
    lines,
    orc_of_spark,
    parquet,
    read,
    spec,
    view,
)

from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources.avro import AvroError
from tidegate.jobs.sources.object_decoding import decode_to_parquet, read_typed_object
from tidegate.jobs.spec.pipeline import ReadLimits


def plain(rows: list[RawRow]) -> list[tuple[Any, ...]]:
    """(time, item, amount) of good rows, the reason of bad ones."""
    return [
        row.bad or (row.values["at"] - TICK, row.values["item"], row.values["amount"])
        for row in rows
    ]


GOOD = [(0, "a", 0), (1_000_000, "b", 1), (2_000_000, "a", 2)]


def test_json_lines(tmp_path: Path) -> None:
    """Each line is a row; an empty line is none."""
    rows, part = read({"1.json": lines(ROWS[0], "", *ROWS[1:])}, tmp_path, format="json")
    assert plain(rows) == GOOD
    assert part.parts[0]["key"] == "inbox/a/1.json"


def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """At the start of the object, and of a line where such files were joined."""
    mark = b"\xef\xbb\xbf"
    data = mark + lines(ROWS[0]) + mark + lines(*ROWS[1:])
    rows, _ = read({"1.json": data}, tmp_path, format="json")
    assert plain(rows) == GOOD


def test_csv(tmp_path: Path) -> None:
    """Columns are found by the header, whatever their order.

    Quoted line breaks are part of a value.
    """
    text = 'item,amount,at\n"a\nx",0,2026-03-01T00:00:00Z\nb,,2026-03-01T01:00:01+01:00\n'
    rows, _ = read({"1.csv": text.encode()}, tmp_path, format="csv")
    assert plain(rows) == [(0, "a\nx", 0), (1_000_000, "b", None)]


def test_a_column_of_csv_may_have_any_name(tmp_path: Path) -> None:
    """A name that tidegate uses itself does not change which lines are rows, nor their order."""
    text = b"at,item,_n\n2026-03-01T00:00:00Z,a,9\nbroken\n2026-03-01T00:00:01Z,b,1\n"
    rows, _ = read({"1.csv": text}, tmp_path, format="csv", evolution={"added": "ignore"})
    found = [row.bad[0] if row.bad else row.values["item"] for row in rows]
    assert found == ["a", "bad_value", "b"]


def test_a_name_that_differs_in_case_only_is_another_column(tmp_path: Path) -> None:
    """An undeclared field `ITEM` neither stops the object nor gives `item` its value."""
    row = {"at": "2026-03-01T00:00:00Z", "item": "a", "amount": 0}
    objects = {"1.json": lines({**row, "ITEM": "x"}, {"ITEM": "x", "at": row["at"]})}
    rows, part = read(objects, tmp_path / "json", format="json")
    assert [(r.bad, r.values["item"]) for r in rows] == [(None, "a"), (None, None)]
    assert list(part.parts[0]["columns"]).count("item") == 1
    text = b"ITEM,at,item,amount\nx,2026-03-01T00:00:00Z,a,0\n"
    rows, _ = read({"1.csv": text}, tmp_path / "csv", format="csv")
    assert [(r.bad, r.values["item"]) for r in rows] == [(None, "a")]


@pytest.mark.parametrize("form", ["json", "csv", "parquet"])
def test_declared_names_that_differ_in_case_only_are_refused(form: str) -> None:
    """Both columns would get one value."""
    schema = {"at": "timestamp", "ID": "long", "id": "long"}
    with pytest.raises(ValueError, match="ID and id differ in upper and lower case only"):
        spec(schema=schema, format=form)


def test_csv_without_header(tmp_path: Path) -> None:
    """Without a header the columns are in the order of the schema."""
    rows, _ = read(
        {"1.csv": b"0;a;0\n1000;b;1\n"},
        tmp_path,
        format="csv",
        parse={"header": False, "delimiter": ";", "timestamps": "ms"},
    )
    assert [row.values["at"] for row in rows] == [0, 1_000_000]


@pytest.mark.parametrize(("ending", "squeeze"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
def test_compressed(tmp_path: Path, ending: str, squeeze: Callable[[bytes], bytes]) -> None:
    """Compressed text is read by the ending of its key."""
    rows, _ = read({f"1.json{ending}": squeeze(lines(*ROWS))}, tmp_path, format="json")
    assert plain(rows) == GOOD


def test_zstd(tmp_path: Path) -> None:
    """Zstandard as well."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(lines(*ROWS))
    rows, _ = read({"1.json.zst": sink.getvalue().to_pybytes()}, tmp_path, format="json")
    assert plain(rows) == GOOD


def test_orc(tmp_path: Path) -> None:
    """ORC keeps its own types."""
    times = pa.array([START + timedelta(seconds=n) for n in range(3)], pa.timestamp("us", "UTC"))
    sink = io.BytesIO()
    orc.write_table(
        pa.table({"at": times, "item": ["a", "b", "a"], "amount": pa.array([0, 1, 2], pa.int32())}),
        sink,
    )
    rows, part = read({"1.orc": sink.getvalue()}, tmp_path, format="orc")
    assert plain(rows) == GOOD
    assert part.parts[0]["columns"]["amount"] == "int32"


@pytest.mark.parametrize(
    ("zone", "hours"), [(b"GMT", 0), (b"PRC", 8), (b"EST", -5)], ids=lambda given: str(given)
)
def test_timestamps_that_spark_wrote_to_orc_are_instants(
    tmp_path: Path, zone: bytes, hours: int
) -> None:
    """Of the zone of their writer, which the file names, as the same rows are in Parquet.

    The source's own zone is for times that name none.
    """
    local = START.replace(tzinfo=None) + timedelta(hours=hours)
    given = orc_of_spark(zone, local, local + timedelta(seconds=1))
    schema = {"at": "timestamp", "item": "string"}
    for name, rule in (("plain", {}), ("zoned", {"timezone": "Asia/Tokyo"})):
        rows, _ = read({"1.orc": given}, tmp_path / name, format="orc", schema=schema, **rule)
        assert [row.bad or row.values["at"] - TICK for row in rows] == [0, 1_000_000]


@pytest.mark.parametrize("codec", ["null", "deflate", "snappy"])
def test_avro(tmp_path: Path, codec: str) -> None:
    """Avro records, with unions and logical types, in the usual codecs."""
    rows, part = read(
        {"1.avro": avro([{**ROWS[0], "item": None}, *ROWS[1:]], codec=codec)},
        tmp_path,
        format="avro",
    )
    assert plain(rows) == [(0, None, 0), *GOOD[1:]]
    assert part.parts[0]["columns"]["at"] == "timestamp[us, tz=UTC]"


def test_a_snappy_block_of_impossible_length_makes_an_object_unreadable() -> None:
    """A damaged length is not a lack of memory, however large it is."""
    whole = avro(ROWS, codec="snappy")
    place = whole.index(AVRO_SYNC) + len(AVRO_SYNC) + 2
    damaged = whole[:place] + b"\xff" * 7 + b"\x7f" + whole[place + 8 :]
    with pytest.raises(AvroError, match="damaged: ValueError"):
        read_typed_object(damaged, "avro")


def test_bad_json_rows_do_not_affect_others(tmp_path: Path) -> None:
    """A line that is not JSON, a value that does not fit and a time without a zone are dead.

    Their neighbours are not.
    """
    bad = [
        {**ROWS[0], "amount": 12.5},
        {**ROWS[0], "at": "2026-03-01T00:00:00"},
        {**ROWS[0], "at": "soon Z"},
        {**ROWS[0], "x": 1},
    ]
    text = lines(ROWS[0], '{"at": ', *bad, ROWS[1])
    strict = {"added": "dead_letter"}
    rows, _ = read({"1.json": text}, tmp_path, format="json", evolution=strict)
    assert [row.bad[1] if row.bad else row.values["amount"] for row in rows] == [
        0,
        "the line is not a JSON object",
        "amount is no long: 12.5",
        'at has no time zone, and the source has no "timezone": 2026-03-01T00:00:00',
        "at is no timestamp: soon Z",
        "not in the schema: x",
        1,
    ]


def test_a_json_text_is_a_number_in_its_plain_form_only(tmp_path: Path) -> None:
    """The text "2" is the long 2, as the documents say, also with spaces; "2.0" is a dead row."""
    given = [{**ROWS[0], "amount": text} for text in ("2", " 2", "2.0")]
    rows, _ = read({"1.json": lines(*given)}, tmp_path, format="json")
    assert [row.bad is None and row.values["amount"] for row in rows] == [2, 2, False]


FITS = [
    ("decimal(6,2)", "1.00", "1.005", Decimal("1.00")),
    (
        "decimal(20,2)",
        "12345678901234567.89",
        "12345678901234567.891",
        Decimal("12345678901234567.89"),
    ),
    ("decimal(10,8)", "0.0000001", "0.000000001", Decimal("0.0000001")),
    ("date", "2026-03-01", "2026-03-01T23:00", date(2026, 3, 1)),
    ("double", str(2**53), str(2**53 + 1), 2.0**53),
    ("double", "0.1", "1e400", 0.1),
    ("float", str(2**24), str(2**24 + 1), 2.0**24),
    ("long", str(2**63 - 1), str(2**63), 2**63 - 1),
    ("boolean", "true", "2", True),
]


@pytest.mark.parametrize(("kind", "good", "bad", "value"), FITS)
@pytest.mark.parametrize("name", ["csv", "json"])
def test_no_value_is_cut_or_rounded(
    tmp_path: Path, name: str, kind: str, good: str, bad: str, value: Any
) -> None:
    """A text or number that its column cannot hold exactly is a dead row.

    One that it can is held exactly.
    """
    quoted = [f'"{v}"' if kind == "date" else v for v in (good, bad)]
    text = {
        "csv": f"at,v\n2026-03-01T00:00:00Z,{good}\n2026-03-01T00:00:00Z,{bad}\n",
        "json": "".join(f'{{"at": "2026-03-01T00:00:00Z", "v": {v}}}\n' for v in quoted),
    }[name]
    rows, _ = read(
        {f"1.{name}": text.encode()}, tmp_path, format=name, schema={"at": "timestamp", "v": kind}
    )
    assert [bool(row.bad) for row in rows] == [False, True]
    assert rows[0].values["v"] == value


@pytest.mark.parametrize("name", ["csv", "json"])
def test_the_end_of_a_date_is_no_zone(tmp_path: Path, name: str) -> None:
    """A plain date is midnight in the source's zone, not in UTC.

    What names no offset is not read as if it did.
    """
    times = [
        "2026-03-01",
        "2026-03-01T00:00-05",
        "2026-03-01 05:00:00Z",
        "2026-03-01 05:00:00 UTC",
        "infinity",
    ]
    text = {
        "csv": "\n".join(["at,item,amount", *(f"{t},a,1" for t in times), ""]).encode(),
        "json": lines(*({"at": t, "item": "a", "amount": 1} for t in times)),
    }[name]
    rows, _ = read({f"1.{name}": text}, tmp_path, format=name, timezone="America/New_York")
    five = 5 * 3_600_000_000
    assert [row.values["at"] - TICK for row in rows if not row.bad] == [five] * 3
    assert [row.bad[1] for row in rows if row.bad] == [
        f"at is no timestamp: {t}" for t in times[3:]
    ]


def test_bad_csv_rows_keep_their_place(tmp_path: Path) -> None:
    """A line with too few values is a dead row at its own position."""
    good = "2026-03-01T00:00:00Z,a,{}"
    rows, _ = read(
        {"1.csv": csv(good.format(0), "2026", good.format("x"), good.format(3))},
        tmp_path,
        format="csv",
    )
    assert [bool(row.bad) for row in rows] == [False, True, True, False]
    assert [row.seq for row in rows] == [0, 1, 2, 3]


@pytest.mark.parametrize("form", ["csv", "json"])
def test_a_byte_that_is_not_utf8_costs_its_row(tmp_path: Path, form: str) -> None:
    """Also in a line with too many values; its neighbours are rows."""
    made = csv("2026-03-01T00:00:00Z,{},0", "2026-03-01T00:00:01Z,b,1")
    data = made.replace(b"{}", b"a\xff\xfe,")[:-1] + b"\n2026-03-01T00:00:02Z,\xc3,2\n"
    if form == "json":
        data = lines(ROWS[0], ROWS[1], ROWS[2]).replace(b'"a"', b'"\xc3"')
    rows, _ = read({"1." + form: data}, tmp_path, format=form)
    first = "the line has more or fewer values than there are columns"
    assert [row.bad and row.bad[1] for row in rows] == [
        first if form == "csv" else "the line is not UTF-8",
        None,
        "the line is not UTF-8",
    ]


@pytest.mark.parametrize("form", ["csv", "json"])
def test_a_local_time_is_the_earlier_instant_or_none(tmp_path: Path, form: str) -> None:
    """One that occurs twice is the earlier of the two; one that the zone skips is a dead row."""
    local = ["2024-10-27T02:30:00", "2024-03-31T02:30:00", "2024-03-31T03:30:00", "2024-06-01"]
    made = [{"at": at, "item": "a", "amount": 0} for at in local]
    data = lines(*made) if form == "json" else csv(*(f"{at},a,0" for at in local))
    rows, _ = read({"1." + form: data}, tmp_path, format=form, timezone="Europe/Berlin")
    found = [row.bad[1] if row.bad else row.values["at"] // 1_000_000 for row in rows]
    skipped = "at is a local time that Europe/Berlin skips: 2024-03-31T02:30:00"
    assert found == [1_729_989_000, skipped, 1_711_848_600, 1_717_192_800]


def test_the_text_of_a_bad_csv_row_is_read_as_the_same_row(tmp_path: Path) -> None:
    """With its quotes: a value may hold a delimiter, a quote or the end of a line."""
    lines = ['soon,"Miller, Sons",1', 'soon,"5"" disk",2', 'soon,"two\nlines",3', "soon,NA,4"]
    text = "at,item,amount\n" + "\n".join(lines)
    seen, *_ = view({"1.csv": text.encode()}, tmp_path, format="csv", parse={"null": "NA"})
    decoded = pq.read_table(pa.BufferReader(seen.get("inbox/a/1.csv").data))
    assert decoded["_text"].to_pylist() == lines


def test_csv_text_behind_a_closing_quote_costs_its_row(tmp_path: Path) -> None:
    """A backslash does not quote a quote, and no quote moves without a word."""
    at = "2026-03-01T00:00:00Z"
    good = {'"a""b"': 'a"b', '"a,b\n"': "a,b\n", 'a"b': 'a"b', '"a"""': 'a"', '""': "", '""""': '"'}
    odd = ['"5\\" disk"', '"a" b', '"" b', '"a""" b', '"a,""b"" c" d']
    rows, _ = read(
        {"1.csv": csv(*(f"{at},{value},1" for value in [*good, *odd]))}, tmp_path, format="csv"
    )
    assert [row.values["item"] for row in rows if not row.bad] == [*good.values()]
    said = [row.bad[1] for row in rows if row.bad]
    assert said == ["a value goes on behind its closing quote"] * len(odd)


def test_a_byte_order_mark_is_no_part_of_a_quoted_value(tmp_path: Path) -> None:
    """The end of its line would be taken for the quotes of the next one."""
    text = '\ufeff"soon,"er,a,1\n2026-03-01T00:00:00Z,"a, b",1\n'
    rows, _ = read({"1.csv": text.encode()}, tmp_path, format="csv", parse={"header": False})
    said = [row.bad[1] for row in rows if row.bad]
    assert said == ["a value goes on behind its closing quote"]
    assert [row.values["item"] for row in rows if not row.bad] == ["a, b"]


def test_added_columns_may_be_ignored(tmp_path: Path) -> None:
    """A column no one declared is left out and named in the plan, unless `added: dead_letter`."""
    text = lines({**ROWS[0], "x": 1, 'y"': 2}, *ROWS[1:])
    rows, part = read({"1.json": text}, tmp_path / "j", format="json")
    assert plain(rows) == GOOD
    assert part.parts[0]["columns"].keys() >= {"x", 'y"'}
    rows, part = read({"1.parquet": parquet(x=pa.array([1, 2, 3]))}, tmp_path / "p")
    assert plain(rows) == GOOD
    assert "x" in part.parts[0]["columns"]
    strict = {"evolution": {"added": "dead_letter"}}
    _, part = read({"1.parquet": parquet(x=pa.array([1, 2, 3]))}, tmp_path / "d", **strict)
    assert part.dead[0].reason == "unknown_column"


def test_an_undeclared_column_may_have_any_name(tmp_path: Path) -> None:
    """A name with quotes is not a part of the SQL that casts the declared columns."""
    text = 'at,item,amount,"o\'clock ""x"""\n2026-03-01T00:00:00Z,a,0,1\n'
    rows, _ = read({"1.csv": text.encode()}, tmp_path, format="csv")
    assert plain(rows) == [(0, "a", 0)]


@pytest.mark.parametrize("renamed", [{}, {"item": "thing"}], ids=["as it is", "decoded"])
def test_times_of_twelve_bytes_are_instants(tmp_path: Path, renamed: dict[str, str]) -> None:
    """INT96 says nothing of a time zone, and means UTC.

    No row is a naive time, in objects that are decoded neither.
    """
    sink = io.BytesIO()
    schema = {"at": "timestamp", renamed.get("item", "item"): "string"}
    table = pq.read_table(io.BytesIO(parquet(amount=None)))
    pq.write_table(table, sink, use_deprecated_int96_timestamps=True, store_schema=False)
    rows, part = read(
        {"1": sink.getvalue()}, tmp_path, schema=schema, evolution={"renamed": renamed}
    )
    assert [row.bad or row.values["at"] - TICK for row in rows] == [0, 1_000_000, 2_000_000]
    assert part.parts[0]["columns"]["at"] == "timestamp[us, tz=UTC]"


def test_renamed_columns(tmp_path: Path) -> None:
    """Objects with the old name and objects with the new one are read alike.

    One with both is a dead letter.
    """
    renamed = {"evolution": {"renamed": {"sum": "amount"}}}
    old, both = parquet(amount=None, sum=pa.array([0, 1, 2])), parquet(sum=pa.array([0, 1, 2]))
    rows, part = read({"1": old, "2": parquet(), "3": both}, tmp_path / "p", **renamed)
    assert plain(rows) == GOOD + GOOD
    assert [dead.reason for dead in part.dead] == ["unknown_column"]
    swapped = {"at": ROWS[0]["at"], "item": "a", "sum": 0}
    rows, _ = read({"1.json": lines(swapped, *ROWS[1:])}, tmp_path / "j", format="json", **renamed)
    assert plain(rows) == GOOD
    rows, _ = read(
        {"1.csv": csv("2026-03-01T00:00:00Z,a,0").replace(b"amount", b"sum")},
        tmp_path / "c",
        format="csv",
        **renamed,
    )
    assert plain(rows) == GOOD[:1]


def test_missing_columns(tmp_path: Path) -> None:
    """A missing column reads as null, or makes its object a dead letter."""
    rows, _ = read({"1": parquet(item=None)}, tmp_path)
    assert [row.values["item"] for row in rows] == [None] * 3
    _, part = read({"1": parquet(item=None)}, tmp_path, evolution={"missing": "dead_letter"})
    assert part.dead[0].reason == "missing_column"


def test_widened_columns(tmp_path: Path) -> None:
    """A narrower physical type is read.

    A wider one gives what fits, and dead letters for the rest.
    """
    rows, _ = read({"1": parquet(amount=pa.array([0, 1, 2], pa.int16()))}, tmp_path)
    assert plain(rows) == GOOD
    rows, _ = read({"1": parquet(amount=pa.array(["0", "1", "x"]))}, tmp_path)
    assert [bool(row.bad) for row in rows] == [False, False, True]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("avro", b"Obj\x01\x02", "truncated"),
        ("orc", b"ORC", "truncated"),
        ("json", b"", "empty_object"),
    ],
)
def test_unreadable_objects(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    """An object that is not what its source says is a dead letter as a whole."""
    _, part = read({f"1.{name}": data}, tmp_path, format=name)
    assert [dead.reason for dead in part.dead] == [reason]


@pytest.mark.parametrize(
    ("ending", "squeeze"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_damaged_compression(
    tmp_path: Path, ending: str, squeeze: Callable[[bytes], bytes]
) -> None:
    """So is one whose compression is damaged."""
    _, part = read({f"1.json{ending}": squeeze(lines(*ROWS))[:-10]}, tmp_path, format="json")
    assert [dead.reason for dead in part.dead] == ["truncated"]


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(WHOLE)), data=st.data())
def test_no_damage_ends_the_reader(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    """Cut off or with other bytes anywhere, an object is a table or a bad object, and nothing else."""
    kind, whole = WHOLE[name]
    damaged = bytearray(whole[: data.draw(st.integers(1, len(whole)))])
    for place, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(damaged) - 1), st.integers(0, 255)), max_size=4)
    ):
        damaged[place] = byte
    out = tmp_path_factory.mktemp("damaged") / "out.parquet"
    found = decode_to_parquet(
        f"inbox/a/{name}", io.BytesIO(damaged), spec(format=kind).sources["a"], out
    )
    assert (found is None) == out.exists()
    if found is None:
        pq.read_table(out)


def test_avro_that_says_nothing(tmp_path: Path) -> None:
    """A header without a schema, and symbols that an enum does not have, on either side of it."""
    plain_schema = b'{"type": "enum", "name": "e", "symbols": ["a", "b"]}'
    for place in (b"\x04", b"\x01"):  # 2 and -1
        schema = (
            b'{"type": "record", "name": "r", "fields": [{"name": "item", "type": '
            + plain_schema
            + b"}]}"
        )
        head = (
            b"Obj\x01\x02"
            + b"\x16avro.schema"
            + bytes([(len(schema) << 1) & 0x7F | 0x80, len(schema) >> 6])
            + schema
            + b"\x00"
        )
        found = decode_to_parquet(
            "1.avro",
            io.BytesIO(head + b"s" * 16 + b"\x02\x02" + place + b"s" * 16),
            spec(format="avro").sources["a"],
            tmp_path / "o",
        )
        assert found is not None
        assert "an enum has no symbol" in found.detail
    found = decode_to_parquet(
        "1.avro",
        io.BytesIO(b"Obj\x01\x00" + b"s" * 16),
        spec(format="avro").sources["a"],
        tmp_path / "o",
    )
    assert found is not None
    assert "the header has no schema" in found.detail


NODE = {
    "type": "record",
    "name": "node",
    "fields": [{"name": "item", "type": ["null", "node"]}],
}


def container(schema: dict[str, Any], rows: list[dict[str, Any]]) -> bytes:
    """An Avro file, by fastavro."""
    out = io.BytesIO()
    fastavro.writer(out, schema, rows)
    return out.getvalue()


def test_avro_that_contains_itself() -> None:
    """Nested records are JSON text; too many of them end neither the reader nor the process."""
    row: dict[str, Any] = {"item": None}
    for _ in range(3):
        row = {"item": row}
    assert read_typed_object(container(NODE, [row]), "avro")["item"].to_pylist() == [
        '{"item":{"item":{"item":null}}}'
    ]
    shallow = container(NODE, [{"item": None}])
    sync = shallow[-16:]
    head = shallow[: shallow.index(sync) + len(sync)]
    count = 100_000
    size = b"\xc2\x9a\x0c"  # 100,001 as Avro has it
    with pytest.raises(AvroError, match="RecursionError"):
        read_typed_object(head + b"\x02" + size + b"\x02" * count + b"\x00" + sync, "avro")


def test_an_avro_decimal_keeps_all_its_digits() -> None:
    """Those beyond the 28 that arithmetic of Python keeps, alone and in nested values."""
    decimals = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}
    prices = {"type": "array", "items": decimals}
    fields = [{"name": "price", "type": decimals}, {"name": "prices", "type": prices}]
    number, text = 10**37 + 1, f"1{'0' * 35}.01"
    raw = number.to_bytes(16, "big")
    row = {"price": raw, "prices": [raw]}
    schema = {"type": "record", "name": "r", "fields": fields}
    found = read_typed_object(container(schema, [row]), "avro")
    assert found["price"].to_pylist() == [Decimal(text)]
    assert found["prices"].to_pylist() == [f'["{text}"]']


def test_avro_values_are_exact() -> None:
    """Nanoseconds, times beyond the year 9999 and decimals are neither rounded nor refused."""
    decimals = {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}
    schema = {
        "type": "record",
        "name": "r",
        "fields": [
            {"name": "ns", "type": {"type": "long", "logicalType": "timestamp-nanos"}},
            {"name": "far", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            {"name": "price", "type": decimals},
        ],
    }
    row = {"ns": 1_700_000_000_000_000_001, "far": 1 << 48, "price": b"\x01\x00"}
    found = read_typed_object(container(schema, [row]), "avro")
    assert found["ns"].cast(pa.int64()).to_pylist() == [row["ns"]]
    assert found["far"].cast(pa.int64()).to_pylist() == [row["far"]]
    assert found["price"].to_pylist() == [Decimal("2.56")]
    with pytest.raises(AvroError, match="ArrowInvalid"):
        read_typed_object(container(schema, [{**row, "price": b"\x7f\xff\xff"}]), "avro")


@pytest.mark.parametrize("head", ["\ufeffitem,at,amount", '"item",at,amount', "\n\nitem,at,amount"])
def test_the_first_column_of_csv_is_text(tmp_path: Path, head: str) -> None:
    """With a byte order mark, quoted or behind empty lines.

    No type is guessed, and 01234 stays what it is.
    """
    rows, _ = read(
        {"1.csv": f"{head}\n01234,2026-03-01T00:00:00Z,1\n".encode()}, tmp_path, format="csv"
    )
    assert plain(rows) == [(0, "01234", 1)]


def test_csv_that_names_a_column_twice(tmp_path: Path) -> None:
    """Which of the two would count is not for us to say."""
    _, part = read(
        {"1.csv": b"at,item,amount,item\n2026-03-01T00:00:00Z,a,1,b\n"}, tmp_path, format="csv"
    )
    assert [dead.detail for dead in part.dead] == [
        "the object cannot be read as csv: the header names a column twice"
    ]


def test_decoded_copy_is_a_cache(tmp_path: Path) -> None:
    """A copy that vanished is decoded again, and gives the same bytes."""
    seen, source, _ = view({"1.json": lines(*ROWS)}, tmp_path, format="json")
    source.plan(Member("a"), None, ReadLimits())
    before = seen.get("inbox/a/1.json").data
    for copy in (tmp_path / "decoded").iterdir():
        copy.unlink()
    seen.download("inbox/a/1.json", tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == before


def test_source_at_an_address_of_its_own(tmp_path: Path) -> None:
    """Objects of a source in another store are reached by keys of their own."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "1.parquet").write_bytes(parquet())
    rows, part = read({}, tmp_path, path=str(tmp_path / "other"))
    assert plain(rows) == GOOD
    assert part.parts[0]["key"] == "@a/1.parquet"
