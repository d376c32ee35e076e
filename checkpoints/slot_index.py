"""Summaries of all slots, on index pages: a cache that lists 10,000 checkpoints in a moment.

Reading 10,000 manifests one by one takes half a minute. A page summarises `SLOTS_PER_PAGE` slots.
Pages can be deleted at any time, every process that lists checkpoints fills them, and they are
written with a condition, so that a slow reader never overwrites a newer version by retention. Slots
are filled without gaps, so the heads of the timelines show which slots exist and the bucket is not
listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from pydantic import TypeAdapter

from tidegate.json_types import JsonObject

from .bucket_layout import CheckpointId
from .canonical_json import canonical_bytes
from .errors import DOCUMENT_CONTENDED
from .manifest import ForkRecord, Manifest
from .record_models import FrozenModel
from .row_counts import RowCounts
from .slot_log import LineageSegment, SlotContents, SlotLog
from .store import NotFoundError, OutcomeUnknownError, PreconditionFailedError, map_in_threads

# Slots a page: about 200 kB, read and parsed in some 10 ms; the unfinished page costs at most 500
# GETs to catch up.
SLOTS_PER_PAGE = 500
_TRIES = 16  # in each lost round another process wrote the page, or the store did not answer
READ_WORKERS = 8  # threads that read slots; MinIO answers no faster with more on two cores


class SlotSummary(FrozenModel):
    """One filled slot, in short.

    `kind` is ``epoch`` (also a merge), ``fork``, ``stub``, or ``missing`` for a slot that is lost;
    only epochs have counts. `id` is None for forks and lost slots. The `parent` of a fork is the
    checkpoint restored. Times are microseconds UTC. `files` and `bytes` count the live segments and
    what the epoch wrote.

    `read`, `released` and `late` are cumulative, as in the manifest's counters; `retained` are the
    rows that wait after the epoch. `late` counts the rows late for at least one output; on pages of
    older versions only those late for the events.

    The last four fields are not on the pages: the catalog fills them in from `roots.json` and the
    lineage. `gap` is the slot of the first retired epoch between the current lineage and an
    abandoned checkpoint; the sinks could not apply that epoch again.
    """

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
    tables: dict[str, int] = {}  # rows this epoch wrote per table
    windows: dict[str, int] = {}  # results this epoch emitted per window
    barriers: int = 0
    pins: tuple[str, ...] = ()
    condemned: str | None = None
    on_lineage: bool = True
    gap: int | None = None

    @property
    def is_restorable(self) -> bool:
        """Return whether it can be restored, as far as this summary shows."""
        return self.kind == "epoch" and self.condemned is None and self.gap is None

    @classmethod
    def from_slot(cls, filled: SlotContents) -> SlotSummary:
        """Summarise the contents of a slot."""
        record = filled.record
        facts: JsonObject = {
            "kind": record.kind,
            "timeline": record.timeline,
            "slot": record.slot,
            "sha256": filled.sha256,
        }
        if isinstance(record, ForkRecord):
            return cls(**facts, id=None, parent=record.recover_to, created_at=record.at)
        facts |= {
            "id": str(record.id), "parent": record.parent, "created_at": record.created_at
        }  # fmt: skip
        return cls(**facts, **(_summarize_epoch(record) if isinstance(record, Manifest) else {}))


def _summarize_epoch(manifest: Manifest) -> JsonObject:
    files, counters = manifest.all_files(), manifest.counters
    return {
        "recorded_now": manifest.recorded_now,
        "read": counters.read,
        "released": counters.released,
        "late": RowCounts.of_sources(counters.per_source).late_rows,
        "retained": counters.retained,
        "files": len(files),
        "bytes": sum(file.bytes for file in files),
        "tables": {
            table: sum(file.rows for file in refs) for table, refs in manifest.files.items()
        },
        "windows": manifest.epoch_counters.windows,
        "barriers": len(manifest.barriers),
    }


_PAGE_ADAPTER = TypeAdapter(list[SlotSummary])


@dataclass(slots=True)
class _IndexPage:
    """A page that is being brought up to date."""

    key: str
    rows: list[SlotSummary]
    etag: str
    missing: range


class SlotIndex:
    """Summaries of all filled slots of one pipeline. Reading brings the pages up to date."""

    def __init__(self, log: SlotLog, *, workers: int = READ_WORKERS) -> None:
        self._log = log
        self._store = log.store
        self._workers = workers

    def iterate_summaries(
        self, timeline: int, *, first: int = 1, last: int | None = None
    ) -> Iterator[SlotSummary]:
        """Yield the filled slots of one timeline from `first` to `last`, oldest first.

        Both ends are included; `last` None is the newest. A lost slot is yielded with the kind
        ``missing``. Only a few pages are in memory at a time, however long the history is.

        Raises:
            PoisonError: a slot cannot be read.
        """
        whole = self._timeline_segment(timeline)
        until = whole.last or 0
        stretch = LineageSegment(
            timeline, max(first, whole.first), until if last is None else min(last, until)
        )
        numbers = _list_page_numbers(stretch)
        for start in range(0, len(numbers), self._workers):
            found = map_in_threads(
                lambda page: self._load_index_page(timeline, page, whole),
                numbers[start : start + self._workers],
                self._workers,
            )
            self._fill_missing_slots(timeline, [page for page in found if page.missing])
            for page in found:
                yield from (row for row in page.rows if stretch.contains(row.slot))

    def iterate_newest_first(self, timeline: int, last: int | None = None) -> Iterator[SlotSummary]:
        """Yield the filled slots of one timeline up to `last` (None: all), newest first.

        Reads only the pages that are needed.
        """
        for page in self._iterate_pages_back(timeline, last):
            yield from (row for row in reversed(page.rows) if last is None or row.slot <= last)

    def iterate_retained(self, timeline: int) -> Iterator[SlotSummary]:
        """Yield the slots of one timeline without its oldest pages that hold only stubs.

        Stubs on other pages, forks and lost slots are yielded too. A stub never changes, so those
        pages are read once, and an object next to them records where the other pages begin.
        """
        key = self._index_page_key(timeline, "retired")
        first, etag = self._read_retired_upto(key)
        only_stubs_upto, so_far = first, True
        for row in self.iterate_summaries(timeline, first=first + 1):
            so_far = so_far and row.kind == "stub"
            # Only whole pages can be left out later, so the bound is the end of a page.
            if so_far and row.slot % SLOTS_PER_PAGE == 0:
                only_stubs_upto = row.slot
            yield row
        if only_stubs_upto > first:
            self._write_if_unchanged(key, only_stubs_upto, etag)

    def refresh(self) -> None:
        """Bring the newest pages up to date, back to the first page that needs nothing.

        The driver and maintenance call this every few hundred epochs. An older page that is missing
        is written by the next process that reads it.
        """
        for timeline in range(self._log.head().timeline, -1, -1):
            for page in self._iterate_pages_back(timeline):
                if page.rows and not page.missing:
                    return

    def note_retired(self, stubs: Iterable[CheckpointId]) -> None:
        """Correct the pages after a retirement: read the rows of these slots again.

        Raises:
            TransientError: a page could not be written. Its rows may still show retired epochs.
        """
        pages: dict[tuple[int, int], set[int]] = {}
        for stub in stubs:
            page = stub.timeline, (stub.slot - 1) // SLOTS_PER_PAGE
            pages.setdefault(page, set()).add(stub.slot)
        stretches = {timeline: self._timeline_segment(timeline) for timeline, _ in pages}
        for (timeline, number), slots in sorted(pages.items()):
            self._correct_page(stretches[timeline], number, slots)

    def _correct_page(self, stretch: LineageSegment, number: int, stubs: set[int]) -> None:
        timeline = stretch.timeline
        for _ in range(_TRIES):
            page = self._load_index_page(timeline, number, stretch)
            fresh = [
                self._summarize_slot(timeline, row.slot) if row.slot in stubs else row
                for row in page.rows
            ]
            # Rows that are not on the page are added: a delayed write of this page may hold them
            # as they were, and only another version of the page refuses it.
            fresh += [self._summarize_slot(timeline, slot) for slot in page.missing]
            # A page ends before a lost slot, so that readers look for that slot each time.
            fresh = [*takewhile(lambda row: row.kind != "missing", fresh)]
            if fresh == page.rows:
                return
            if self._write_index_page(page.key, fresh, page.etag):
                return
        raise DOCUMENT_CONTENDED(uri=self._store.uri(page.key))

    def _iterate_pages_back(self, timeline: int, last: int | None = None) -> Iterator[_IndexPage]:
        """Yield the pages from that of slot `last` back (None: from the newest).

        `missing` names the slots that were filled in.
        """
        stretch = self._timeline_segment(timeline)
        for number in reversed(_list_page_numbers(stretch)):
            if last is not None and number * SLOTS_PER_PAGE >= last:
                continue
            page = self._load_index_page(timeline, number, stretch)
            if page.missing:
                self._fill_missing_slots(timeline, [page])
            yield page

    def _read_retired_upto(self, key: str) -> tuple[int, str]:
        """Return the slot up to which a timeline has stubs only, and the ETag of that record."""
        try:
            found = self._store.get(key)
            return int(found.data), found.etag
        except (NotFoundError, ValueError):
            return 0, ""

    def _timeline_segment(self, timeline: int) -> LineageSegment:
        """The filled slots of a timeline, with the fork record that ended it.

        `last` is before `first` while it is empty.
        """
        head = self._log.head()
        forks = self._log.list_forks()
        first = 1 if timeline == 0 else forks[timeline - 1].fork_slot + 1
        last = forks[timeline].slot if timeline < len(forks) else head.slot
        return LineageSegment(timeline, first, last)

    def _load_index_page(self, timeline: int, number: int, stretch: LineageSegment) -> _IndexPage:
        """One page as it was last written, and the slots that were sealed since."""
        first = max(stretch.first, number * SLOTS_PER_PAGE + 1)
        last = min(stretch.last or 0, (number + 1) * SLOTS_PER_PAGE)
        key = self._index_page_key(timeline, number)
        rows, etag = self._read_index_page(key)
        return _IndexPage(key, rows, etag, range(rows[-1].slot + 1 if rows else first, last + 1))

    def _fill_missing_slots(self, timeline: int, pages: list[_IndexPage]) -> None:
        """Read the missing slots of all pages at once, and write the pages."""
        slots = [slot for page in pages for slot in page.missing]
        summaries = map_in_threads(
            lambda slot: self._summarize_slot(timeline, slot), slots, self._workers
        )
        rows = iter(summaries)
        for page in pages:
            page.rows.extend(next(rows) for _ in page.missing)
            if all(
                row.kind != "missing" for row in page.rows
            ):  # damage is looked at again each time
                self._write_index_page(page.key, page.rows, page.etag)

    def _read_index_page(self, key: str) -> tuple[list[SlotSummary], str]:
        try:
            found = self._store.get(key)
            return _PAGE_ADAPTER.validate_json(found.data), found.etag
        except NotFoundError:
            return [], ""
        except ValueError:  # a cache that cannot be read is rebuilt
            self._store.delete(key)
            return [], ""

    def _write_index_page(self, key: str, rows: list[SlotSummary], etag: str) -> bool:
        content = _PAGE_ADAPTER.dump_python(rows, mode="json", exclude_defaults=True)
        return self._write_if_unchanged(key, content, etag)

    def _write_if_unchanged(self, key: str, content: Any, etag: str) -> bool:
        """Return whether it was written. Refused: the next reader sees another process's page."""
        data = canonical_bytes(content)
        try:
            if etag:
                self._store.compare_and_swap(key, data, etag)
            else:
                self._store.create(key, data)
        except (PreconditionFailedError, OutcomeUnknownError):
            return False
        return True

    def _index_page_key(self, timeline: int, page: int | str) -> str:
        name = page if isinstance(page, str) else f"{page:07d}"
        return self._log.layout.index_page_key(f"t{timeline}-{name}")

    def _summarize_slot(self, timeline: int, slot: int) -> SlotSummary:
        filled = self._log.read_slot(timeline, slot)
        if filled is None:  # definite damage: slots are filled without gaps and never deleted
            return SlotSummary(
                kind="missing",
                timeline=timeline,
                slot=slot,
                id=None,
                parent=None,
                sha256="",
                created_at=0,
            )
        return SlotSummary.from_slot(filled)


def _list_page_numbers(stretch: LineageSegment) -> range:
    """Numbers of the pages that hold a stretch."""
    last = stretch.last or 0
    return range(
        (stretch.first - 1) // SLOTS_PER_PAGE,
        (last - 1) // SLOTS_PER_PAGE + 1 if last >= stretch.first else 0,
    )
