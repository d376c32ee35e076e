"""The objects source: order, limits, trimming, bad objects, replay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore
from tests.sources.object_inputs import ME, all_slices, inbox, parquet, rows_of, spec

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.store import ObjectInfo, StoredObject, StoreUnavailableError
from tidegate.jobs.engine.interfaces import Slice, join_seq, skip_slice_record
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources import object_inspection
from tidegate.jobs.sources.object_decoding import BadObject
from tidegate.jobs.sources.object_source import DONE_MARKER, ObjectSource
from tidegate.jobs.spec.pipeline import ReadLimits


def source(objects: dict[str, bytes], **more: Any) -> ObjectSource:
    """The source over a memory store with these objects."""
    store = MemoryStore(MemoryBucket(dict(objects)))
    return ObjectSource("a", spec(**more), store)


STRICT = {"evolution": {"added": "dead_letter"}}


def test_reads_in_key_order() -> None:
    """Every row of every object is read once, in the order of the keys."""
    got = rows_of(all_slices(source(inbox(2, 3, 1)), ReadLimits()))
    assert got == [("000", 0), ("000", 1), ("001", 0), ("001", 1), ("001", 2), ("002", 0)]


def test_part_says_what_to_read() -> None:
    """A part pins key, ETag, size and physical columns, and gives ordinal and row range."""
    part = source(inbox(2)).plan(ME, None, ReadLimits()).parts[0]
    assert part["key"] == "inbox/a/000.parquet"
    assert part["etag"]
    assert part["size"] == len(parquet(2))
    assert part["columns"] == {"t": "timestamp[us, tz=UTC]", "n": "int64"}
    assert (part["ordinal"], part["rows"], part["row_start"], part["row_end"]) == (0, 2, 0, 2)


def test_a_slice_says_when_its_oldest_object_arrived(tmp_path: Path) -> None:
    """As the store stamps it; in the manifest too, and not in the record of a skipped slice."""
    store = LocalStore(tmp_path)
    for number, (key, data) in enumerate(inbox(2, 2).items()):
        store.put(key, data)
        os.utime(tmp_path / key, (1_000 - number, 1_000 - number))
    part = ObjectSource("a", spec(), store).plan(ME, None, ReadLimits())
    assert part.arrived == 999_000_000
    assert Slice.from_record(ME, part.to_record()) == part
    assert "arrived" not in skip_slice_record(part.to_record())


@pytest.mark.parametrize("objects", [1, 2, 3])
def test_object_limit(objects: int) -> None:
    """An epoch takes at most `limits.objects` objects and says that more is pending."""
    slices = all_slices(source(inbox(1, 1, 1)), ReadLimits(objects=objects))
    assert [len(s.parts) for s in slices] == {1: [1, 1, 1], 2: [2, 1], 3: [3]}[objects]
    assert [s.pending for s in slices] == [True] * (len(slices) - 1) + [False]


@pytest.mark.parametrize(("most", "objects"), [(1, [1, 1, 1]), (1.5, [2, 1]), (3, [3])])
def test_byte_limit(most: float, objects: list[int]) -> None:
    """An epoch begins no further object once it has as many bytes, and takes one of any size."""
    slices = all_slices(source(inbox(1, 1, 1)), ReadLimits(bytes=int(most * len(parquet(1)))))
    assert [len(s.parts) for s in slices] == objects
    assert [s.pending for s in slices] == [True] * (len(slices) - 1) + [False]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 100])
def test_row_limit_cuts_inside_objects(rows: int) -> None:
    """A row limit cuts inside an object, and the next slice goes on at the very next row."""
    src = source(inbox(3, 0, 4, 2))
    slices = all_slices(src, ReadLimits(rows=rows))
    assert rows_of(slices) == rows_of(all_slices(src, ReadLimits()))
    assert all(len(rows_of([s])) <= rows for s in slices)
    assert all(a.end == b.start for a, b in pairwise(slices))


def test_trim_then_resume_equals_no_trim() -> None:
    """A slice trimmed anywhere, and the slice after it, hold the same rows as the whole slice."""
    src = source(inbox(3, 2, 4))
    whole = src.plan(ME, None, ReadLimits())
    for key, row in rows_of([whole]):
        cut = src.trim(whole, join_seq(int(key), row) + 1)
        assert cut.pending or cut == whole
        rest = all_slices(src, ReadLimits(), cut.resume)
        assert rows_of([cut, *rest]) == rows_of([whole])


def test_trim_at_the_end_is_nothing() -> None:
    """Trimming to the slice's own end changes nothing."""
    src = source(inbox(3))
    whole = src.plan(ME, None, ReadLimits())
    assert src.trim(whole, whole.end) is whole


def test_trim_drops_dead_objects_behind_the_barrier() -> None:
    """A bad object behind the barrier is not consumed yet."""
    src = source({**inbox(3), "inbox/a/001.parquet": b"junk"})
    cut = src.trim(src.plan(ME, None, ReadLimits()), join_seq(0, 2))
    assert cut.dead == ()
    rest = src.plan(ME, cut.resume, ReadLimits())
    assert [d.seq for d in rest.dead] == [join_seq(1, 0)]
    assert rows_of([rest]) == [("000", 2)]


def test_replay_gives_identical_slices() -> None:
    """Resuming from an old checkpoint in a new process plans exactly the same slices again."""
    objects = {**inbox(5, 0, 3, 2), "inbox/a/0015.parquet": b"junk"}
    first = all_slices(source(objects), ReadLimits(rows=2))
    for i, part in enumerate(first):
        assert all_slices(source(objects), ReadLimits(rows=2), part.resume) == first[i + 1 :]


def test_blocked_only_tells_pending() -> None:
    """A blocked member reads nothing, keeps its place, and tells whether something waits."""
    src = source(inbox(2, 2))
    one = src.plan(ME, None, ReadLimits(objects=1))
    held = src.plan(ME, one.resume, ReadLimits(), blocked=True)
    assert (held.is_empty, held.pending, held.resume) == (True, True, one.resume)
    two = src.plan(ME, one.resume, ReadLimits())
    assert not src.plan(ME, two.resume, ReadLimits(), blocked=True).pending


def test_bounded_source_ends_at_its_marker() -> None:
    """A bounded member is done when the marker is there and everything was read, not before."""
    objects = inbox(1, 1)
    assert not source(objects, bounded=True).plan(ME, None, ReadLimits()).done
    src = source({**objects, f"inbox/a/{DONE_MARKER}": b""}, bounded=True)
    first = src.plan(ME, None, ReadLimits(objects=1))
    assert (first.done, first.pending) == (False, True)
    assert src.plan(ME, first.resume, ReadLimits()).done


def test_the_end_of_input_needs_no_marker() -> None:
    """With `ends_input` a member is done when the objects that are there were read."""
    src = source(inbox(1, 1))
    src.ends_input = True
    first = src.plan(ME, None, ReadLimits(objects=1))
    assert (first.done, first.pending) == (False, True)
    assert src.plan(ME, first.resume, ReadLimits()).done


def test_marker_without_bounded_means_nothing() -> None:
    """An unbounded source ignores markers and all other names with a leading underscore or dot."""
    src = source(
        {
            **inbox(1),
            "inbox/a/_DONE": b"",
            "inbox/a/_SUCCESS": b"",
            "inbox/a/.hidden/x.parquet": b"x",
        }
    )
    part = src.plan(ME, None, ReadLimits())
    assert (part.done, part.pending, part.dead, len(part.parts)) == (False, False, (), 1)


def test_folders_are_partitions() -> None:
    """With `partition_by: folder` each folder is a member that reads its own objects."""
    src = source(
        {
            "inbox/a/x/1.parquet": parquet(1),
            "inbox/a/y/1.parquet": parquet(2),
            "inbox/a/_tmp/1.parquet": parquet(1),
        },
        partition_by="folder",
    )
    members = src.list_members()
    assert members == [Member("a", "x"), Member("a", "y")]
    assert [src.plan(m, None, ReadLimits()).parts[0]["rows"] for m in members] == [1, 2]


def bad_objects() -> dict[str, tuple[bytes, str]]:
    """Case -> (bytes, reason)."""
    good = parquet(10)
    times = pa.array([1], pa.timestamp("us", tz="UTC"))
    return {
        "empty": (b"", "empty_object"),
        "text": (b"a,b\n1,2\n", "not_parquet"),
        "tiny": (b"x", "not_parquet"),
        "only magic": (b"PAR1", "truncated"),
        "no start": (bytes(4) + parquet(9_000)[4:], "not_parquet"),
        "half": (good[: len(good) // 2], "truncated"),
        "no tail": (good[:-1], "truncated"),
        "bad footer": (good[:-200] + b"\xff" * 192 + good[-8:], "truncated"),
        "unknown column": (
            parquet(1, t=times, n=pa.array([1]), extra=pa.array([1])),
            "unknown_column",
        ),
        "no event time": (parquet(1, n=pa.array([1])), "missing_column"),
    }


@pytest.mark.parametrize("case", bad_objects())
def test_bad_object_is_consumed_and_named(case: str) -> None:
    """A bad object is consumed as a dead letter with its reason; the objects around it are read."""
    data, reason = bad_objects()[case]
    src = source(
        {
            "inbox/a/000.parquet": parquet(1),
            "inbox/a/001.parquet": data,
            "inbox/a/002.parquet": parquet(1),
        },
        **STRICT,
    )
    part = src.plan(ME, None, ReadLimits())
    assert [(d.key, d.reason, d.seq, d.size) for d in part.dead] == [
        ("inbox/a/001.parquet", reason, join_seq(1, 0), len(data))
    ]
    assert rows_of([part]) == [("000", 0), ("002", 0)]
    assert src.plan(ME, part.resume, ReadLimits()).is_empty


def test_unknown_column_is_named() -> None:
    """The dead letter names the column that no one declared."""
    data, _ = bad_objects()["unknown column"]
    assert (
        "extra" in source({"inbox/a/1": data}, **STRICT).plan(ME, None, ReadLimits()).dead[0].detail
    )


def test_other_missing_columns_and_wrong_types_are_not_bad_objects() -> None:
    """A missing column reads as null and a text in a number column is judged row by row.

    The object is good.
    """
    times = pa.array([1, 2], pa.timestamp("us", tz="UTC"))
    src = source(
        {"inbox/a/1": parquet(2, t=times), "inbox/a/2": parquet(2, t=times, n=pa.array(["1", "x"]))}
    )
    part = src.plan(ME, None, ReadLimits())
    assert part.dead == ()
    assert [p["columns"].get("n") for p in part.parts] == [None, "string"]


def test_open_object_that_changed_is_an_error_row() -> None:
    """An object replaced while it was read in part is a dead letter, not a new object."""
    src = source(inbox(5, 1))
    first = src.plan(ME, None, ReadLimits(rows=2))
    assert isinstance(src.store, MemoryStore)
    src.store.put("inbox/a/000.parquet", parquet(7))
    rest = src.plan(ME, first.resume, ReadLimits())
    assert [(d.reason, d.seq) for d in rest.dead] == [("changed_object", join_seq(0, 2))]
    assert rows_of([rest]) == [("001", 0)]


def test_changed_names_replaced_and_vanished_objects() -> None:
    """Between plan and re-read, a new ETag or a missing object is found by looking again."""
    src = source(inbox(1, 1, 1))
    part = src.plan(ME, None, ReadLimits())
    assert src.find_changed_objects(part) == ()
    src.store.put("inbox/a/001.parquet", parquet(2))
    src.store.delete("inbox/a/002.parquet")
    assert [(d.key, d.reason) for d in src.find_changed_objects(part)] == [
        ("inbox/a/001.parquet", "changed_object"),
        ("inbox/a/002.parquet", "changed_object"),
    ]


def test_unreachable_store_is_transient() -> None:
    """A store that is away raises a transient error and loses nothing."""
    src = source(inbox(1))
    assert isinstance(src.store, MemoryStore)
    src.store.hook = lambda request: Fault.REFUSED
    with pytest.raises(StoreUnavailableError):
        src.plan(ME, None, ReadLimits())


def test_footers_are_read_once() -> None:
    """Planning again reads no footer again."""
    src = source(inbox(1, 1, 1))
    assert isinstance(src.store, MemoryStore)
    asked: list[str] = []
    src.plan(ME, None, ReadLimits())
    src.store.hook = lambda request: asked.append(request.verb)
    src.plan(ME, None, ReadLimits())
    assert asked == ["list"]


def test_large_object_is_read_by_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large object only the end is fetched, also when the footer is longer than the first
    range.
    """
    monkeypatch.setattr("tidegate.jobs.sources.object_inspection._WHOLE_READ_BYTES", 100)
    for first_read in (64 << 10, 1 << 10, 64):
        monkeypatch.setattr("tidegate.jobs.sources.object_inspection._FIRST_READ_BYTES", first_read)
        part = source(inbox(1000)).plan(ME, None, ReadLimits())
        assert part.parts[0]["rows"] == 1000
        dead = (
            source({"inbox/a/1": parquet(1000)[:-3], "inbox/a/2": b"x" * 5000})
            .plan(ME, None, ReadLimits())
            .dead
        )
        assert [d.reason for d in dead] == ["truncated", "not_parquet"]


class Crowded(MemoryStore):
    """A folder of a million objects, all alike, that counts how many names it tells."""

    COUNT = 1_000_000
    listed = 0

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        if prefix != "inbox/a/":
            yield from super().list_objects(prefix, start_after=start_after, limit=limit)
            return
        first = int(start_after[-15:-8]) + 1 if start_after else 0
        for number in range(first, min(self.COUNT, first + (limit or self.COUNT))):
            self.listed += 1
            yield ObjectInfo(f"inbox/a/{number:07d}.parquet", 1, "e", 0.0)

    def get(self, key: str) -> StoredObject:
        return StoredObject(key, ONE, "e") if key.startswith("inbox/") else super().get(key)

    def stat(self, key: str) -> ObjectInfo | None:
        return (
            ObjectInfo(key, len(ONE), "e", 0.0) if key.startswith("inbox/") else super().stat(key)
        )


ONE = parquet(1)


@pytest.mark.parametrize("done", [0, 500_000, 999_990])
def test_a_million_objects_are_never_listed_whole(done: int) -> None:
    """Wherever a reader is among a million objects, it asks for the next names only."""
    store = Crowded(MemoryBucket({}))
    src = ObjectSource("a", spec(), store)
    key = f"inbox/a/{done - 1:07d}.parquet" if done else None
    part = src.plan(
        ME, {"ordinal": done, "row": 0, "key": key, "open": None}, ReadLimits(objects=5)
    )
    assert [p["ordinal"] for p in part.parts] == list(range(done, done + 5))
    assert store.listed <= 7


def test_a_million_arrivals_are_entered_in_pieces() -> None:
    """With names in no order, a look at a million objects takes a bounded piece of the listing, and
    reading begins at once.
    """
    store = Crowded(MemoryBucket({}))
    src = ObjectSource("a", spec(discovery={"order": "arrival"}), store, pipeline="p")
    part = src.plan(ME, None, ReadLimits(objects=5))
    assert len(part.parts) == 5
    first, store.listed = store.listed, 0
    src.plan(ME, dict(part.resume), ReadLimits(objects=5))
    assert max(first, store.listed) <= 20_000, (
        "behind the greatest name, and a piece of the safety listing"
    )


def test_an_object_behind_the_last_one_read_is_counted() -> None:
    """In the order of keys it is never read, so the status says how many there are.

    Each counts once. Objects of an earlier process and deleted ones do not count.
    """
    bucket, now = MemoryBucket(dict(inbox(1, 1, 1, 1))), [0.0]
    src = ObjectSource("a", spec(), MemoryStore(bucket), clock=lambda: now[0])
    resume = src.plan(ME, None, ReadLimits(objects=2)).resume
    src = ObjectSource("a", spec(), MemoryStore(bucket), clock=lambda: now[0])
    resume = src.plan(ME, resume, ReadLimits(objects=1)).resume
    objects = MemoryStore(bucket)
    for name in ("000b", "001b", "002b", "_hidden"):
        objects.put(f"inbox/a/{name}.parquet", parquet(1))
    objects.delete("inbox/a/001.parquet")
    assert src.late_uploads == 0
    for _ in range(2):
        now[0] += 600.0
        resume = src.plan(ME, resume, ReadLimits(objects=1)).resume
    assert src.late_uploads == 1  # 001b; 002b was still ahead, 000b is behind the first position
    assert resume is not None
    assert resume["key"] == "inbox/a/003.parquet"


def test_the_search_for_skipped_objects_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the newest names are remembered, so a long run lists no more than these again."""
    monkeypatch.setattr("tidegate.jobs.sources.object_source._MAX_KNOWN_KEYS", 3)
    bucket, now = MemoryBucket(dict(inbox(*[1] * 8))), [0.0]
    store = MemoryStore(bucket)
    src = ObjectSource("a", spec(), store, clock=lambda: now[0])
    resume = src.plan(ME, None, ReadLimits(objects=7)).resume
    store.put("inbox/a/001b.parquet", parquet(1))
    store.put("inbox/a/005b.parquet", parquet(1))
    now[0] += 600.0
    src.plan(ME, resume, ReadLimits())
    assert src.late_uploads == 1


def test_an_error_without_a_text_gives_the_name_of_its_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A footer whose reader fails without a word is a bad object, as any other."""

    def fail(file: object) -> None:
        raise MemoryError

    monkeypatch.setattr("pyarrow.parquet.read_metadata", fail)
    found = object_inspection._parse_metadata(b"", 4)
    assert isinstance(found, BadObject)
    assert found.detail.endswith("MemoryError")
