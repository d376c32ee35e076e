"""Summaries of all slots, on index pages: a cache that makes listing ten thousand checkpoints a matter of a moment.

Reading 10,000 manifests one by one takes half a minute, so summaries of them are kept on pages of `PAGE` slots each. Pages can be
deleted at any time, are filled up by whoever lists, and are written with a condition, so that a slow reader never overwrites
what retention has written since. Slots are filled without gaps, so no listing of the bucket is needed: the heads of the
timelines tell which slots exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from tidegate.checkpoints.canonical import canonical_bytes
from tidegate.checkpoints.layout import CheckpointId
from tidegate.checkpoints.log import Filled, SlotLog, Stretch
from tidegate.checkpoints.manifest import ForkRecord, Manifest, Stub
from tidegate.checkpoints.store import NotFoundError, OutcomeUnknownError, PreconditionFailedError

__all__ = ["SlotIndex", "Summary"]

PAGE = 500  # slots a page: about 200 kB, read and parsed in some 10 ms; the unfinished page costs at most 500 GETs to catch up
WORKERS = 8  # threads that read slots; MinIO answers no faster with more on two cores

A = TypeVar("A")
B = TypeVar("B")


class Summary(BaseModel):
    """One filled slot, in short.

    `read`, `released`, `late` and `retained` are cumulative, as in the manifest's counters. The last three fields are not on the
    pages: the catalog fills them in from `roots.json` and the lineage.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: str
    timeline: int
    slot: int
    id: str | None
    parent: str | None
    sha256: str
    created_at: int
    recorded_now: int | None = None
    read: int = 0
    released: int = 0
    late: int = 0
    retained: int = 0
    files: int = 0
    bytes: int = 0
    tables: dict[str, int] = Field(default_factory=dict)  # rows this epoch wrote per table
    windows: dict[str, int] = Field(default_factory=dict)  # results this epoch emitted per window
    barriers: int = 0
    pins: tuple[str, ...] = ()
    condemned: str | None = None
    on_lineage: bool = True

    @property
    def restorable(self) -> bool:
        """Whether it can be restored as far as is known."""
        return self.kind == "epoch" and self.condemned is None

    @classmethod
    def of(cls, filled: Filled) -> Summary:
        """The summary of what fills a slot."""
        record = filled.record
        if isinstance(record, ForkRecord):
            return cls(
                kind=record.kind,
                timeline=record.timeline,
                slot=record.slot,
                id=None,
                parent=record.recover_to,
                sha256=filled.sha256,
                created_at=record.at,
            )
        if isinstance(record, Stub):
            return cls(
                kind=record.kind,
                timeline=record.timeline,
                slot=record.slot,
                id=str(record.id),
                parent=record.parent,
                sha256=filled.sha256,
                created_at=record.created_at,
            )
        return cls._of_epoch(record, filled.sha256)

    @classmethod
    def _of_epoch(cls, manifest: Manifest, sha256: str) -> Summary:
        own = manifest.notes.get("epoch") or {}
        files = manifest.all_files()
        return cls(
            kind=manifest.kind,
            timeline=manifest.timeline,
            slot=manifest.slot,
            id=str(manifest.id),
            parent=manifest.parent,
            sha256=sha256,
            created_at=manifest.created_at,
            recorded_now=manifest.recorded_now,
            read=manifest.counters.read,
            released=manifest.counters.released,
            late=manifest.counters.late,
            retained=manifest.counters.retained,
            files=len(files),
            bytes=sum(file.bytes for file in files),
            tables={table: sum(file.rows for file in refs) for table, refs in manifest.files.items()},
            windows=dict(own.get("windows", {})),
            barriers=len(manifest.barriers),
        )


_PAGE_ROWS = TypeAdapter(list[Summary])


@dataclass(slots=True)
class _Page:
    """A page that is being brought up to date."""

    key: str
    rows: list[Summary]
    etag: str
    missing: range


class SlotIndex:
    """Rows about all filled slots of one pipeline. Reading brings the pages up to date."""

    def __init__(self, log: SlotLog, *, workers: int = WORKERS) -> None:
        self._log = log
        self._store = log.store
        self._workers = workers

    def rows(self, timeline: int) -> list[Summary]:
        """Summaries of all filled slots of one timeline, oldest first; brings its index pages up to date."""
        stretch = self._own_slots(timeline)
        found = self._each(lambda page: self._known(timeline, page, stretch), _pages(stretch))
        self._fill_up(timeline, [page for page in found if page.missing])
        return [row for page in found for row in page.rows]

    def newest_first(self, timeline: int) -> Iterator[Summary]:
        """The same rows from the newest back, reading only as many pages as are asked for."""
        stretch = self._own_slots(timeline)
        for number in reversed(_pages(stretch)):
            page = self._known(timeline, number, stretch)
            if page.missing:
                self._fill_up(timeline, [page])
            yield from reversed(page.rows)

    def refresh(self) -> None:
        """Bring the index up to date. Worth doing every few hundred epochs, by the driver or by maintenance."""
        for timeline in range(self._log.head().timeline + 1):
            self.rows(timeline)

    def rebuild(self) -> None:
        """Throw the index away and read every manifest again."""
        for entry in [*self._store.list(self._log.layout.index)]:
            self._store.delete(entry.key)
        self.refresh()

    def note_stubs(self, stubs: Iterable[CheckpointId]) -> None:
        """Correct the pages after a retirement: the rows of these slots are read anew."""
        slots = {(stub.timeline, (stub.slot - 1) // PAGE) for stub in stubs}
        gone = {(stub.timeline, stub.slot) for stub in stubs}
        for timeline, page in sorted(slots):
            key = self._page_key(timeline, page)
            rows, etag = self._read_page(key)
            fresh = [self._summary(timeline, row.slot) if (timeline, row.slot) in gone else row for row in rows]
            if fresh != rows:
                self._write_page(key, fresh, etag)

    def _own_slots(self, timeline: int) -> Stretch:
        """The filled slots of a timeline, with the fork record that ended it; `last` is before `first` while it is empty."""
        head = self._log.head()
        forks = self._log.forks()
        first = 1 if timeline == 0 else forks[timeline - 1].fork_slot + 1
        last = forks[timeline].slot if timeline < len(forks) else head.slot
        return Stretch(timeline, first, last)

    def _known(self, timeline: int, number: int, stretch: Stretch) -> _Page:
        """One page as it was last written, and the slots that were sealed since."""
        first = max(stretch.first, number * PAGE + 1)
        last = min(stretch.last or 0, (number + 1) * PAGE)
        key = self._page_key(timeline, number)
        rows, etag = self._read_page(key)
        return _Page(key, rows, etag, range(rows[-1].slot + 1 if rows else first, last + 1))

    def _fill_up(self, timeline: int, pages: list[_Page]) -> None:
        """Read the missing slots of all pages at once, and write the pages."""
        slots = [slot for page in pages for slot in page.missing]
        rows = iter(self._each(lambda slot: self._summary(timeline, slot), slots))
        for page in pages:
            page.rows.extend(next(rows) for _ in page.missing)
            if all(row.kind != "missing" for row in page.rows):  # damage is looked at anew each time
                self._write_page(page.key, page.rows, page.etag)

    def _read_page(self, key: str) -> tuple[list[Summary], str]:
        try:
            found = self._store.get(key)
            return _PAGE_ROWS.validate_json(found.data), found.etag
        except NotFoundError:
            return [], ""
        except ValueError:  # a cache that cannot be read is rebuilt
            self._store.delete(key)
            return [], ""

    def _write_page(self, key: str, rows: list[Summary], etag: str) -> None:
        data = canonical_bytes(_PAGE_ROWS.dump_python(rows, mode="json", exclude_defaults=True))
        # Refused: somebody else wrote the page, and the next reader sees theirs.
        with suppress(PreconditionFailedError, OutcomeUnknownError):
            _ = self._store.swap(key, data, etag) if etag else self._store.create(key, data)

    def _page_key(self, timeline: int, page: int) -> str:
        return self._log.layout.index_page(f"t{timeline}-{page:07d}")

    def _summary(self, timeline: int, slot: int) -> Summary:
        filled = self._log.read(timeline, slot)
        if filled is None:  # definite damage: slots are filled without gaps and never deleted
            return Summary(kind="missing", timeline=timeline, slot=slot, id=None, parent=None, sha256="", created_at=0)
        return Summary.of(filled)

    def _each(self, ask: Callable[[A], B], items: Iterable[A]) -> list[B]:
        todo = [*items]
        if self._workers <= 1 or len(todo) < 2:
            return [ask(item) for item in todo]
        with ThreadPoolExecutor(self._workers) as pool:
            return [*pool.map(ask, todo)]


def _pages(stretch: Stretch) -> range:
    """Numbers of the pages that hold a stretch."""
    last = stretch.last or 0
    return range((stretch.first - 1) // PAGE, (last - 1) // PAGE + 1 if last >= stretch.first else 0)
