"""Objects whose names are not in arrival order: entered once into a log, and read in its order."""

from __future__ import annotations

import secrets
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.new_process import call_in_new_process
from tests.servers.memory_store import MemoryBucket, MemoryStore, StoreRequest
from tests.servers.minio import CertifiedMinio, RealMinio
from tests.sources.object_inputs import ME, all_slices, inbox, parquet, rows_of, spec

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.s3_store import S3Store
from tidegate.checkpoints.store_probe import require_honest_store
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources import arrival_log
from tidegate.jobs.sources.arrival_log import (
    ArrivalLog,
    BucketNotifications,
    _SeenKeys,
    listen_for_objects,
)
from tidegate.jobs.sources.factory import PipelineSources
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_source import DONE_MARKER, ObjectSource
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def log_of(store: MemoryStore, clock: Clock) -> ArrivalLog:
    """The log of the folder inbox/a/."""
    return ArrivalLog(
        store,
        "p/arrivals/a/0/",
        "inbox/a/",
        is_data=lambda name: name[0] != "_",
        safety=60.0,
        clock=clock,
    )


def store_of(*names: str) -> MemoryStore:
    """A store with these objects below inbox/a/."""
    return MemoryStore(MemoryBucket({f"inbox/a/{name}": parquet(1) for name in names}))


def found(log: ArrivalLog) -> list[str]:
    """The last part of each name, in order."""
    return [key.rpartition("/")[2] for key in log.read_keys(0, 1_000_000)]


def test_late_uploads_are_at_the_end() -> None:
    """An object that sorts before known ones is found by the safety listing, counted as late, and
    read after them.
    """
    store, clock = store_of("b", "d"), Clock()
    log = log_of(store, clock)
    log.discover()
    store.put("inbox/a/a", parquet(1))
    store.put("inbox/a/e", parquet(1))
    log.discover()
    assert found(log) == ["b", "d", "e"]
    clock.now = 60.0
    log.discover()
    assert found(log) == ["b", "d", "e", "a"]
    assert log.late == 1


def test_notices_need_no_listing() -> None:
    """What a notification names is entered at once, once, and only if it is data of this folder."""
    store = store_of("m")
    log = log_of(store, Clock())
    log.discover()
    log.discover(["inbox/a/c", "inbox/a/c", "inbox/a/_tmp", "inbox/b/x", "inbox/a/m"])
    assert found(log) == ["m", "c"]


def test_log_survives_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process reads the same order from the pages, across page borders, and enters nothing
    twice.
    """
    monkeypatch.setattr(arrival_log, "_KEYS_PER_PAGE", 3)
    store = store_of(*"abcdefgh")
    first = log_of(store, Clock())
    first.discover()
    second = log_of(store, Clock())
    second.discover()
    assert found(second) == found(first) == list("abcdefgh")
    assert second.read_keys(2, 3) == ["inbox/a/c", "inbox/a/d", "inbox/a/e"]
    assert len(list(store.list_objects("p/arrivals/"))) == 3


def test_a_log_of_an_earlier_version_names_a_file_with_a_backslash(tmp_path: Path) -> None:
    """The file is read once, at its place in the log."""
    store = LocalStore(tmp_path)
    store.put("p/arrivals/a/0/000000000000.json", b'{"keys":["inbox/a/1\\\\2.parquet"]}')
    (tmp_path / "inbox/a").mkdir(parents=True)
    (tmp_path / "inbox/a/1\\2.parquet").write_bytes(parquet(3))
    options = spec(format="parquet", discovery={"order": "arrival"})
    source = ObjectSource("a", options, store, pipeline="p")
    (part,) = source.plan(Member("a"), None, ReadLimits()).parts
    assert (part["key"], part["row_end"]) == ("inbox/a/1%5C2.parquet", 3)


@pytest.mark.parametrize("partition_by", ["source", "folder"])
def test_the_log_is_read_before_the_first_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, partition_by: str
) -> None:
    """Reading the pages of tens of millions of objects takes long, and is a step of its own."""
    monkeypatch.setattr(arrival_log, "_KEYS_PER_PAGE", 1)
    monkeypatch.setattr(arrival_log, "_PAGES_PER_BATCH", 2)
    store = store_of("x/a", "x/b", "x/c")
    options = {"discovery": {"order": "arrival"}, "partition_by": partition_by}
    sources = {"a": spec(path="inbox/a", **options)}
    pipeline = PipelineSpec.model_validate({"name": "p", "sources": sources})
    before = PipelineSources(pipeline, InputView(store, pipeline, tmp_path)).all[0]
    (member,) = before.list_members()
    assert len(before.plan(member, None, ReadLimits()).parts) == 3
    later = PipelineSources(pipeline, InputView(store, pipeline, tmp_path))
    later.open_logs()
    assert isinstance(store, MemoryStore)
    asked: list[tuple[str, str]] = []
    store.hook = lambda request: asked.append((request.verb, request.key))
    assert later.all[0].plan(member, None, ReadLimits()).parts[0]["key"] == "inbox/a/x/a"
    assert ("list", f"p/arrivals/a/{member.partition}/") not in asked


def test_two_writers_never_disagree() -> None:
    """A driver that lost its place reads the other's entries first.

    An object has one place for good.
    """
    store = store_of("b")
    one, two = log_of(store, Clock()), log_of(store, Clock())
    one.discover()
    two.discover()
    store.put("inbox/a/c", parquet(1))
    one.discover()
    two.discover(["inbox/a/a"])
    one.discover()
    assert found(two) == ["b", "c", "a"]
    assert found(log_of(store, Clock())) == ["b", "c", "a"]


def test_safety_listing_is_done_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large folder is listed a piece at a time; no call lists it all."""
    monkeypatch.setattr(arrival_log, "_KEYS_PER_LISTING", 2)
    store, clock = store_of(*"bcdef"), Clock()
    log = log_of(store, clock)
    log.discover()
    assert found(log) == ["b", "c"]
    for _ in range(4):
        log.discover()
    store.put("inbox/a/a", parquet(1))
    clock.now = 60.0
    log.discover()
    assert found(log) == list("bcdefa")


def test_source_reads_in_arrival_order() -> None:
    """The source's positions follow the log.

    A late upload is read, and resuming anywhere gives the same rows.
    """
    store = MemoryStore(MemoryBucket(inbox(2, 2)))
    clock = Clock()
    source = ObjectSource(
        "a", spec(discovery={"order": "arrival"}), store, pipeline="p", clock=clock
    )
    before = all_slices(source, ReadLimits(rows=3))
    store.put("inbox/a/-01.parquet", parquet(2))
    clock.now = 600.0
    after = all_slices(source, ReadLimits(), before[-1].resume)
    assert rows_of(before + after) == [
        ("000", 0),
        ("000", 1),
        ("001", 0),
        ("001", 1),
        ("-01", 0),
        ("-01", 1),
    ]
    again = ObjectSource(
        "a", spec(discovery={"order": "arrival"}), store, pipeline="p", clock=clock
    )
    assert rows_of(all_slices(again, ReadLimits(rows=1))) == rows_of(before + after)


@pytest.mark.parametrize(
    ("order", "behind"), [("arrival", [3, 2, 1, 1, 0]), ("keys", [1, 1, 1, 1, 0])]
)
def test_what_waits_is_counted_as_far_as_it_is_known(order: str, behind: list[int]) -> None:
    """The log of arrivals knows all of it.

    Whoever reads by key lists one object more than he takes. Half an object waits too.
    """
    source = ObjectSource(
        "a",
        spec(discovery={"order": order}),
        MemoryStore(MemoryBucket(inbox(1, 1, 2))),
        pipeline="p",
    )
    resume, waiting = None, []
    for number in range(len(behind)):
        resume = source.plan(ME, resume, ReadLimits(objects=1, rows=1), blocked=number == 0).resume
        waiting.append(source.backlog[str(ME)])
    assert waiting == behind


def test_bounded_source_ends_after_a_whole_listing() -> None:
    """With the end marker there, everything is listed before the source says that it is done."""
    store, clock = MemoryStore(MemoryBucket(inbox(1, 1))), Clock()
    source = ObjectSource(
        "a", spec(discovery={"order": "arrival"}, bounded=True), store, pipeline="p", clock=clock
    )
    resume = source.plan(ME, None, ReadLimits()).resume
    store.put("inbox/a/-01.parquet", parquet(1))
    store.put(f"inbox/a/{DONE_MARKER}", b"")
    last = source.plan(ME, resume, ReadLimits())
    assert (rows_of([last]), last.done) == ([("-01", 0)], True)


def test_an_end_in_the_middle_of_a_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing that was under way when the end came has passed names already.

    It begins again, once, and not in every epoch.
    """
    monkeypatch.setattr(arrival_log, "_KEYS_PER_LISTING", 2)
    listed: list[str] = []

    def note(request: StoreRequest) -> None:
        listed.extend(
            [request.key] if request.verb == "list" and request.key.startswith("inbox/") else []
        )

    store = MemoryStore(MemoryBucket(inbox(1, 1, 1, 1, 1)), hook=note)
    source = ObjectSource(
        "a", spec(discovery={"order": "arrival"}, bounded=True), store, pipeline="p", clock=Clock()
    )
    resume = source.plan(ME, None, ReadLimits()).resume
    store.put("inbox/a/-01.parquet", parquet(1))
    store.put(f"inbox/a/{DONE_MARKER}", b"")
    found = []
    for _ in range(3):
        listed.clear()
        part = source.plan(ME, resume, ReadLimits(objects=2))
        found += rows_of([part])
        resume = part.resume
    assert ("-01", 0) in found
    assert (len(found), part.done) == (4, True)
    assert len(listed) == 1, "behind the greatest name, and no more"


def add_names(seen: _SeenKeys) -> int:
    """Add 100,000 names; return the bytes that Python then holds more."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for n in range(100_000):
        seen.add(f"inbox/a/{n}")
    return tracemalloc.get_traced_memory()[0] - before


def test_what_is_known_takes_little_memory() -> None:
    """Less than 24 bytes a name; none is forgotten, and none is taken for known."""
    assert call_in_new_process(add_names, _SeenKeys()) < 24 * 100_000
    seen = _SeenKeys()
    for n in range(100_000):
        seen.add(f"inbox/a/{n}")
    assert all(f"inbox/a/{n}" in seen for n in range(0, 100_000, 97))
    assert not any(f"inbox/b/{n}" in seen for n in range(0, 100_000, 97))


def test_object_that_is_gone_is_a_dead_letter() -> None:
    """An arrival that was deleted before it was read does not hold the source up."""
    store = MemoryStore(MemoryBucket(inbox(1, 1)))
    source = ObjectSource(
        "a", spec(discovery={"order": "arrival"}), store, pipeline="p", clock=Clock()
    )
    assert source.plan(ME, None, ReadLimits(), blocked=True).pending
    store.delete("inbox/a/000.parquet")
    part = source.plan(ME, None, ReadLimits())
    assert ([d.reason for d in part.dead], rows_of([part])) == (["changed_object"], [("001", 0)])


def test_notifications_may_fail() -> None:
    """A store without notifications ends the listener, and nothing else."""
    tried = threading.Event()

    def refuse() -> Iterator[str]:
        tried.set()
        raise OSError("NotImplemented")
        yield ""

    notices = BucketNotifications(refuse)
    assert tried.wait(120)
    assert notices.take_keys() == []
    notices.close()


def test_local_store_has_none(tmp_path: Path) -> None:
    """A local folder is polled."""
    assert listen_for_objects(open_store(str(tmp_path)), "inbox/") is None


@pytest.mark.minio
def test_minio_names_new_objects(minio_environment: RealMinio) -> None:
    """A late upload to a real MinIO is named within moments, by its name below the folder."""
    store = open_store(f"s3://{minio_environment.bucket}/notices")
    assert isinstance(store, S3Store)
    assert heard_from(store) == {"a/é 1.parquet"}


@pytest.mark.minio
@pytest.mark.parametrize(
    "elsewhere", [False, True], ids=["in the store", "at an address of its own"]
)
def test_a_late_upload_is_read_because_minio_named_it(
    minio_environment: RealMinio, tmp_path: Path, elsewhere: bool
) -> None:
    """From the bucket to the slice, long before the next safety listing, wherever the source lies."""
    base = f"s3://{minio_environment.bucket}/{secrets.token_hex(4)}"
    path = f"{base}/other/a" if elsewhere else "inbox/a"
    pipeline = PipelineSpec.model_validate(
        {"name": "p", "sources": {"a": spec(path=path, discovery={"order": "arrival"})}}
    )
    store = open_store(base)
    view = InputView(store, pipeline, tmp_path)
    home, folder = view.locate_source("a")
    home.put(f"{folder}m.parquet", parquet(1))
    sources = PipelineSources(pipeline, view)
    (source,) = sources.all
    resume = source.plan(ME, None, ReadLimits()).resume
    deadline, late = time.monotonic() + 60, source.plan(ME, resume, ReadLimits())
    while late.is_empty and time.monotonic() < deadline:
        home.put(
            f"{folder}a.parquet", parquet(1)
        )  # again and again: when the listener is ready is not known
        time.sleep(0.1)
        late = source.plan(ME, resume, ReadLimits())
    sources.close()
    assert [part["key"].rpartition("/")[2] for part in late.parts] == ["a.parquet"]


@pytest.mark.minio
def test_minio_names_new_objects_over_tls(
    tls_minio: CertifiedMinio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is over TLS, where AWS_CA_BUNDLE names the file of a private CA."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tls_minio.ca))
    store = S3Store(tls_minio.settings("notices"))
    require_honest_store(store)  # waits until the server has started
    assert heard_from(store) == {"a/é 1.parquet"}


def heard_from(store: S3Store) -> set[str]:
    """What is named when an object is written."""
    notices = listen_for_objects(store, "inbox/")
    assert notices is not None
    heard: list[str] = []
    deadline = time.monotonic() + 60
    while not heard and time.monotonic() < deadline:
        store.put(
            "inbox/a/é 1.parquet", b"x"
        )  # again and again: when the listener is ready is not known
        time.sleep(0.1)
        heard = notices.take_keys()
    notices.close()
    return set(heard)
