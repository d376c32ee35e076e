"""The simulated bucket, and each process's way to it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tests.servers.memory_store import MemoryBucket, MemoryStore, StoreRequest, compute_etag
from tests.simulation.basics import PIPELINE, Violation
from tests.simulation.cheap import parsed
from tests.simulation.coverage import ASK, BACKGROUND, INNER, KINDS, LIST, PUT, SWAP

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.errors import (
    BUCKET_DENIED,
    KEYS_EXPIRED,
    OBJECT_NOT_FOUND,
    OUTCOME_UNKNOWN,
    PRECONDITION_FAILED,
    STORE_UNAVAILABLE,
)
from tidegate.checkpoints.store import (
    ObjectInfo,
    PreconditionFailedError,
    StoredObject,
)

if TYPE_CHECKING:
    from tests.simulation.world import World

_SORTS = {"create": SWAP, "swap": SWAP, "put": PUT, "delete": PUT}
POINTER = f"{PIPELINE}/iceberg/current.json"
CATALOG_ENTRY = "/catalog.json"  # of a table, in a private catalog
MERGED = "/merged/"  # folder of files that compaction made
_PAGE = 40  # keys a listing shows at once
_MOST_EPOCHS = 3  # that a driver seals before it answers: one that was under way, and two tries
_PROMPT = 60.0  # seconds in which a driver answers when nothing goes wrong; most take less than 6


class SimBucket(MemoryBucket):
    """A bucket that watches what must never happen to it.

    Keys are in order, and ETags are taken once.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.layout = BucketLayout(PIPELINE)
        self.keys: list[str] = []
        self.etags: dict[str, str] = {}
        self.needs: dict[str, set[str]] = {}  # slot key -> keys its manifest names
        self.records: dict[str, dict[str, Any]] = {}  # slot key -> what was sealed there first
        self.bytes: dict[str, bytes] = {}  # of slots, as first filled
        self.tokens: dict[str, int] = {}  # driver -> its token, of those that have had the lease
        self.renewed_at = 0.0  # when the lease was last written
        self.stopped_at = 0.0  # when somebody last noted that no driver is wanted
        self.ignored: Counter[tuple[str, str]] = (
            Counter()
        )  # (request, driver) -> epochs sealed since
        self.asked: dict[str, tuple[float, str]] = {}  # open request -> when it came, its kind
        self.written: dict[str, bytes] = {}  # of all files, whether or not they are still there

    def apply(self, request: StoreRequest) -> str:
        """Let a write take effect, if the bucket may look like that."""
        key, verb, there = request.key, request.verb, self.etags.get(request.key)
        if verb == "delete":
            if there is not None:
                self.world.judge.removed(key)
            self._deleting(key)
            self.remove(key)
            return ""
        if verb == "create" and there is not None:
            raise PRECONDITION_FAILED(uri=key, expected="nothing", found=there)
        if verb == "swap" and there != request.etag:
            raise PRECONDITION_FAILED(uri=key, expected=str(request.etag), found=there or "nothing")
        before, data = self.objects.get(key), request.data or b""
        if there is None:
            insort(self.keys, key)
        self.objects[key] = data
        etag = self.etags[key] = compute_etag(data)
        self.world.judge.wrote(key, data, self.world.catalog.versions)
        self._watch(request, before)
        return etag

    def _watch(self, request: StoreRequest, before: bytes | None) -> None:
        """Look at what a write has changed."""
        key, data = request.key, request.data or b""
        if "/slots/" in key:
            self._filled(request, before)
        elif key == self.layout.lease_key:
            token, driver = mark = _lease_mark(data)
            self.world.mark("lease", mark)
            self.tokens[driver or ""] = token
            self.renewed_at = self.world.now
            self._require_prompt_answers(driver)
        elif key == self.layout.desired_key and parsed(data)["state"] == "stopped":
            self.stopped_at = self.world.now
        elif key.startswith(self.layout.requests_prefix):
            self.asked.setdefault(
                key.removeprefix(self.layout.requests_prefix),
                (self.world.now, parsed(data)["kind"]),
            )
        elif key.startswith(self.layout.acks_prefix):
            self.asked.pop(key.removeprefix(self.layout.acks_prefix), None)
        elif key == POINTER:
            self._pointed(parsed(data))
        elif key.endswith(CATALOG_ENTRY):
            location = str(parsed(data)["metadata_location"])
            self.world.catalog.name_version(key.split("/")[-2], location)
        elif "/tables/" in key or "/state/" in key or MERGED in key:
            self.written.setdefault(key, data)

    def remove(self, key: str) -> None:
        """An object is deleted, by any process."""
        if self.objects.pop(key, None) is not None:
            del self.etags[key], self.keys[bisect_left(self.keys, key)]

    def damage(self, key: str, left: float | None) -> None:
        """An object is gone, cut to a share of its bytes, or as long as before with a wrong one."""
        data = self.objects.get(key)
        if left is None or data is None:
            return self.remove(key)
        half = len(data) // 2
        # No text in UTF-8 has this byte after one of ASCII.
        wrong = data[:half] + bytes([data[half] ^ 0x80]) + data[half + 1 :] if data else b""
        self.objects[key] = wrong if left == 1 else data[: int(len(data) * left)]
        self.etags[key] = compute_etag(self.objects[key])
        return None

    def wipe(self) -> None:
        """Everything goes."""
        self.world.judge.begin_again()
        for kept in (
            self.objects,
            self.keys,
            self.etags,
            self.needs,
            self.records,
            self.bytes,
            self.ignored,
            self.asked,
            self.written,
        ):
            kept.clear()

    def page(self, prefix: str, after: str, size: int) -> list[str]:
        """The next keys under a prefix."""
        start = bisect_left(self.keys, max(prefix, after))
        found = [key for key in self.keys[start : start + size + 1] if key > after][:size]
        return [key for key in found if key.startswith(prefix)]

    def _filled(self, request: StoreRequest, there: bytes | None) -> None:
        data = request.data or b""
        record = parsed(data)
        if record["kind"] == "stub":
            self.needs.pop(request.key, None)
            return
        if there is not None and there != data:
            raise Violation(f"a filled slot changed: {request.key}")
        self.records[request.key], self.bytes[request.key] = record, data
        self.world.slot_marks = (
            *self.world.slot_marks,
            (record["timeline"], record["slot"], record.get("driver", "fork")),
        )
        self.world.mark("slots", self.world.slot_marks)
        if record["kind"] == "epoch" and there is None:
            self._require_answers(record["driver"])
        if record["kind"] == "epoch":
            files = {
                f["key"]
                for f in [*record["segments"], *(f for fs in record["files"].values() for f in fs)]
            }
            missing = sorted(files - self.objects.keys() - self.world.lost)
            if missing:
                raise Violation(
                    f"slot {record['slot']} of {record['timeline']} was sealed although"
                    f" {missing[0]} is gone"
                )
            self.needs[request.key] = files

    def _require_answers(self, driver: str) -> None:
        """A driver that goes on sealing answers what it was asked."""
        for key in self.page(self.layout.requests_prefix, "", 1000):
            name = key.removeprefix(self.layout.requests_prefix)
            if f"{self.layout.acks_prefix}{name}" in self.objects:
                continue
            self.ignored[key, driver] += 1
            if self.ignored[key, driver] > _MOST_EPOCHS:
                raise Violation(f"{driver} sealed {_MOST_EPOCHS} epochs and did not answer {name}")

    def _require_prompt_answers(self, driver: str | None) -> None:
        """A driver that renews its lease, and that nothing disturbs, answers in bounded time."""
        actor = self.world.current()
        if actor is None or actor.process.name != driver or not self.asked:
            return
        if any(kind == "hold" for _, kind in self.asked.values()):  # a merge has the next slot
            actor.process.calm_since = self.world.now
        for name, (since, kind) in self.asked.items():
            waited = self.world.now - max(since, actor.process.calm_since)
            if waited > _PROMPT:
                raise Violation(f"{driver} has not answered {kind} {name} for {waited:.0f} s")

    def _pointed(self, current: dict[str, Any]) -> None:
        """Readers see one cut: no table is on another timeline, or shows more."""
        for table, location in current["tables"].items():
            main = self.world.catalog.versions[location].main
            mark = main and main.mark
            if mark and (mark.timeline != current["timeline"] or mark.upto > current["upto"]):
                at = f"slot {current['upto']} of timeline {current['timeline']}"
                raise Violation(f"readers of {table} are pointed to {mark} as {at}")

    def _deleting(self, key: str) -> None:
        if key not in self.objects or (
            self.layout.parse_attempt(key) is None and MERGED not in key
        ):
            return
        for slot, files in self.needs.items():
            if key in files:
                raise Violation(f"{key} was deleted although {slot} names it")
        if key in self.world.table_files():
            raise Violation(f"{key} was deleted although a table names it")


def _lease_mark(data: bytes) -> tuple[Any, ...]:
    record = parsed(data)
    return record["token"], record["holder"] and record["holder"]["driver"]


class JudgeStore(MemoryStore):
    """A way to the bucket on which nothing goes wrong and no time passes."""

    bucket: SimBucket

    def __init__(self, bucket: SimBucket) -> None:
        super().__init__(bucket, name="sim")

    def get(self, key: str) -> StoredObject:
        """Read one object."""
        data = self.bucket.objects.get(key)
        if data is None:
            raise OBJECT_NOT_FOUND(uri=self.uri(key))
        return StoredObject(key, data, self.bucket.etags[key])

    def stat(self, key: str) -> ObjectInfo | None:
        """Describe one object."""
        return self._entry(key) if key in self.bucket.objects else None

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        """Objects under `prefix` in key order, as they are when the listing starts."""
        size = limit if limit is not None else len(self.bucket.keys)
        return iter([*map(self._entry, self.bucket.page(prefix, start_after or "", size))])

    def _entry(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self.bucket.objects[key]), self.bucket.etags[key], None)


class SimStore(JudgeStore):
    """One process's way to the bucket."""

    def __init__(self, world: World) -> None:
        super().__init__(world.bucket)
        self.world = world

    def get(self, key: str) -> StoredObject:
        """Read one object."""
        self._begin_read("get", key)
        return super().get(key)

    def stat(self, key: str) -> ObjectInfo | None:
        """Describe one object."""
        self._begin_read("head", key)
        return super().stat(key)

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        """In pages, each as the bucket is when it is asked for."""
        left, after = limit if limit is not None else 1 << 60, start_after or ""
        while left > 0:
            size = min(left, _PAGE)
            torn = self._meet_read("list", prefix) == "torn list"
            page = [self._entry(key) for key in self.bucket.page(prefix, after, size)]
            if torn:
                yield from page[: (len(page) + 1) // 2]
                raise STORE_UNAVAILABLE(uri=self.uri(prefix), cause="torn list")
            yield from page
            if len(page) < size:
                return
            left, after = left - len(page), page[-1].key

    def _begin_read(self, verb: str, key: str) -> None:
        self._meet_read(verb, key)

    def _meet_read(self, verb: str, key: str) -> str:
        kind = self._meet_fate(verb, key, LIST if verb == "list" else ASK)
        if kind and kind != "torn list":
            self.world.endure(kind)
        return kind

    def _meet_fate(self, verb: str, key: str, sort: str) -> str:
        """Let the request travel; return what happens to it, or raise if it is refused."""
        world = self.world
        world.travel()
        actor = world.current()
        if actor is not None and world.now < actor.process.denied_until and not world.calm:
            raise KEYS_EXPIRED(location=self.url, cause="ExpiredToken")
        inner = actor is not None and actor.role in BACKGROUND
        kind = world.fate(verb, key, KINDS[sort] + (KINDS[INNER] if inner else ()))
        if kind == "503":
            raise STORE_UNAVAILABLE(uri=self.uri(key), cause="503")
        if kind == "denied":
            world.deny()
            raise BUCKET_DENIED(location=self.url, cause="AccessDenied")
        if kind == "defect":
            world.defects += 1
            raise RuntimeError("a defect")
        return kind

    def _send_write(self, request: StoreRequest) -> str:
        kind = self._meet_fate(request.verb, request.key, _SORTS[request.verb])
        if not kind:
            return self.bucket.apply(request)
        if kind in ("sleep", "crash", "slow", "clock jump"):
            self.world.endure(kind)
        if kind == "late":
            self._hold(request)
        if kind in ("409", "lost request", "late"):
            raise OUTCOME_UNKNOWN(uri=self.uri(request.key), cause=kind)
        return self._effect(request, kind)

    def _effect(self, request: StoreRequest, kind: str) -> str:
        if kind in ("lost answer", "500", "crash after"):
            with suppress(PreconditionFailedError):
                self.bucket.apply(request)
            if kind == "crash after":
                self.world.endure("crash")
            raise OUTCOME_UNKNOWN(uri=self.uri(request.key), cause=kind)
        etag = self.bucket.apply(request)
        if kind == "retried" and request.key.startswith("tidegate-probe/"):
            self.world.current_process().repeated_probes.add(request.key)
        if kind == "retried":  # the client library asked twice; the second answer counts
            raise PRECONDITION_FAILED(uri=request.key, expected="the first answer", found=etag)
        if kind == "twice":
            self._hold(request)
        if kind == "slow answer":
            self.world.endure(kind)
        return etag

    def _hold(self, request: StoreRequest) -> None:
        """It arrives later, and is judged by the bucket as it is then."""

        def arrive() -> None:
            with suppress(PreconditionFailedError):
                self.bucket.apply(request)

        self.world.late.append((f"{request.verb} {request.key}", arrive))
