"""Folders of objects as sources: the real ones, on the simulated bucket.

Objects are marshalled rows, as the files of epochs are. Under `discovery.order: arrival` their names
have no order, and the arrival log in the bucket gives them their places.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tests.oracle.memory_source import MemorySource
from tests.oracle.rows import RawRow
from tests.servers.memory_store import StoreRequest
from tests.simulation.basics import PIPELINE, Violation
from tests.simulation.cheap import parsed, rows_of
from tests.simulation.storage import SimStore
from tests.simulation.topic_feed import TopicFeed

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.jobs.driver.landing_log import LandingLog
from tidegate.jobs.engine.interfaces import Slice, join_seq
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources import object_inspection
from tidegate.jobs.sources.object_inspection import Footer, ReadRange
from tidegate.jobs.sources.object_source import DONE_MARKER, ObjectSource
from tidegate.jobs.spec.pipeline import SourceSpec

if TYPE_CHECKING:
    from tests.simulation.world import World

_COLUMNS = {"t": "timestamp[us, tz=UTC]", "v": "int64", "kind": "string", "n": "int64"}


class ObjectFeed:
    """One source: its producer, and what the judge knows of it."""

    def __init__(self, name: str, spec: SourceSpec, world: World) -> None:
        self.name, self.spec, self.world = name, spec, world
        self.member = Member(name)
        self._prefix = f"{spec.path.strip('/')}/"
        self._written: list[str] = []

    def open(self) -> ObjectSource:
        """The source of one driver."""
        clock = lambda: self.world.clock().monotonic()  # noqa: E731
        return ObjectSource(
            self.name, self.spec, SimStore(self.world), pipeline=PIPELINE, clock=clock
        )

    def append(self, *rows: Mapping[str, Any], partition: str = "0") -> None:
        """One more object; with `order: keys` behind all others."""
        drawn = f"{self.world.rng.getrandbits(32):08x}"
        ordered = self.spec.discovery.order == "keys"
        key = (
            f"{self._prefix}{len(self._written):04d}-{drawn}"
            if ordered
            else f"{self._prefix}{drawn}"
        )
        self._written.append(key)
        self._put(key, marshal.dumps([*rows], 2))

    def end(self, _: str = "0") -> None:
        """No more objects will come."""
        self._put(f"{self._prefix}{DONE_MARKER}", b"")

    def _put(self, key: str, data: bytes) -> None:
        self.world.bucket.apply(StoreRequest("put", key, data))

    def close(self) -> None:
        """Nothing to give back."""

    def list_members(self) -> Sequence[Member]:
        """The only one."""
        return [self.member]

    def rows(self, part: Slice) -> Iterator[RawRow]:
        """The rows of a slice, for the mover and the judge."""
        store = SimStore(self.world)
        for piece in part.parts:
            rows = rows_of(store.get(piece["key"]).data)
            for number in range(piece["row_start"], piece["row_end"]):
                yield RawRow(join_seq(piece["ordinal"], number), rows[number])

    def list_placed(self) -> Iterator[tuple[Member, int, dict[str, Any]]]:
        """Every row that a producer wrote, with its member and its place; -1 for none."""
        places = {key: ordinal for ordinal, key in enumerate(self._list_in_order())}
        for key in self._written:
            for number, row in enumerate(rows_of(self.world.bucket.objects[key])):
                place = join_seq(places[key], number) if key in places else -1
                yield self.member, place, row

    def end_position(self, _: Member) -> int:
        """Where one is who has read everything."""
        return join_seq(len(self._written), 0)

    def _list_in_order(self) -> list[str]:
        if self.spec.discovery.order == "keys":
            return self._written
        prefix = BucketLayout(PIPELINE).arrivals_prefix(self.name, self.member.partition)
        objects = self.world.bucket.objects
        pages = self.world.bucket.page(prefix, "", 1000)
        return [key for page in pages for key in parsed(objects[page])["keys"]]


def _read_footer(size: int, read_range: ReadRange, _: int = 0) -> Footer:
    return Footer(len(rows_of(read_range(0, size))), _COLUMNS)


FOOTERS = (object_inspection, "read_footer", _read_footer)
"""What reads an object's number of rows: module, name, replacement."""


class LandedFeed(ObjectFeed):
    """An origin that cannot be read by range; a landing query writes its rows as objects.

    The log of the landing is the real one. Of Structured Streaming there is what it needs: a batch
    gets its number and its offsets on the disk, is written, and is then noted as committed.
    """

    def __init__(self, name: str, spec: SourceSpec, world: World) -> None:
        super().__init__(name, spec, world)
        self._origin: list[dict[str, Any]] = []
        self._ended = False
        self._batches: list[tuple[int, int]] = []  # as the query's folder has them
        self._committed = -1  # the newest batch of the folder `commits`
        self._disk = TemporaryDirectory(prefix="tidegate-sim-")

    def append(self, *rows: Mapping[str, Any], partition: str = "0") -> None:
        """More rows come."""
        self._origin.extend(dict(row) for row in rows)

    def end(self, _: str = "0") -> None:
        """No more rows will come; the query ends when all are landed."""
        self._ended = True

    def land(self) -> None:
        """The body of a landing process."""
        clock, store = self.world.clock(), SimStore(self.world)
        log = LandingLog(self.name, self.spec, store, Path(self._disk.name))
        with log.lock_folder():
            while True:
                batch = self._plan_batch(log.spark_folder)
                if batch is not None:
                    number, start, end = batch
                    rows = self._origin[start:end]
                    log.land_batch(number, marshal.dumps(rows, 2), len(rows))
                    _note(log.spark_folder / "commits" / str(number), "")
                    self._committed = number
                elif self._ended:
                    return super().end()
                else:
                    clock.sleep(0.5)

    def _plan_batch(self, folder: Path) -> tuple[int, int, int] | None:
        planned = len(self._batches) - 1
        start, end = self._batches[-1] if self._batches else (0, 0)
        if planned > self._committed:
            return planned, start, end
        if end == len(self._origin):
            return None
        upto = min(len(self._origin), end + self.world.rng.randrange(1, 4))
        self._batches.append((end, upto))
        _note(folder / "offsets" / str(planned + 1), json.dumps([end, upto]))
        return planned + 1, end, upto

    def close(self) -> None:
        """The disk goes."""
        self._disk.cleanup()

    def _list_in_order(self) -> list[str]:
        keys = [key for key in self.world.bucket.page(self._prefix, "", 1000) if "/_" not in key]
        landed = [row for key in keys for row in rows_of(self.world.bucket.objects[key])]
        if landed != self._origin[: len(landed)]:
            raise Violation(f"{self.name} has landed {landed}, and not {self._origin}")
        return keys

    def list_placed(self) -> Iterator[tuple[Member, int, dict[str, Any]]]:
        """Every row that came, with its member and its place; -1 for one that was not landed."""
        self._written = self._list_in_order()
        yield from super().list_placed()
        landed = sum(len(rows_of(self.world.bucket.objects[key])) for key in self._written)
        yield from ((self.member, -1 - n, row) for n, row in enumerate(self._origin[landed:]))

    def end_position(self, _: Member) -> int:
        """Where one is who has read everything."""
        return join_seq(len(self._list_in_order()), 0)


def _note(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def make_feed(name: str, spec: SourceSpec, world: World) -> ObjectFeed | TopicFeed | MemorySource:
    """The feed of a source: a topic, objects, or rows in memory where it is not bounded."""
    if spec.kafka is not None:
        return TopicFeed(name, spec, world)
    if not spec.bounded:
        return MemorySource(name)
    return (LandedFeed if spec.path.endswith("landed/") else ObjectFeed)(name, spec, world)
