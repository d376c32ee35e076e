"""The append-only log of objects that a landing query writes.

    <path>/_landing/<generation>.json    who writes this generation, and its newest batch;
    put-if-absent, then swapped <path>/_landing/status.json          what the process says about
    itself, for people <path>/<generation>-<batch>.parquet  put-if-absent: one object per batch that
    had rows

Spark's own checkpoint says which offsets a batch holds; the bucket says which batches are landed. A
batch is noted in its generation, with a digest of the offsets that Spark wrote down for it, before
its object is written. After a crash Spark runs the last batch again under the same number, finds
its object there, and goes on: once, whatever was killed when. Three things follow:

* Only the newest batch may come again, and only with the same offsets. Anything else is a
  checkpoint folder that went back, by a backup or a lost file: its batches would be numbered again
  over other offsets, and look landed. It is refused.
* So is another folder, which would number its batches from 0: each generation belongs to one folder
  by a random id, until somebody asks for a new generation, knowing what the origin gives then.
* Whoever begins a generation closes the one before: its note cannot be swapped any more, and a
  batch that is noted but not written finds an empty object in its place. So nothing is ever written
  behind keys that may have been read.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.store import (
    NotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    Store,
)
from tidegate.errors import ConfigurationError, FencedError, TidegateError, TransientError
from tidegate.jobs.driver.otel_metrics import LandingMetrics
from tidegate.jobs.engine.fault_points import Faults, NoFaults
from tidegate.jobs.sources.input_view import locate_source
from tidegate.jobs.spec.pipeline import SourceSpec

_log = structlog.get_logger("tidegate.landing")

_ID_FILE: Final = "tidegate-landing.json"  # in the checkpoint folder
_FORMATS_WITHOUT_OFFSETS: Final = (
    "socket",
)  # formats whose offsets mean nothing to the next process
_WRITE_ATTEMPTS: Final = 10  # of one write whose outcome is not known
_STATUS_KEY: Final = "_landing/status.json"


@dataclass(frozen=True, slots=True)
class _GenerationNote:
    """A generation, as it stands in the bucket.

    Attributes:
        id: of the checkpoint folder that writes it.
        batch: the newest that was begun; -1 before the first.
        offsets: digest of what Spark noted about it.
        closed: a newer generation has begun, or is about to.
    """

    id: str
    batch: int = -1
    offsets: str = ""
    closed: bool = False

    def to_bytes(self) -> bytes:
        return json.dumps(
            {"id": self.id, "batch": self.batch, "offsets": self.offsets, "closed": self.closed}
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> _GenerationNote:
        raw = json.loads(data)
        return cls(raw["id"], raw["batch"], raw["offsets"], raw["closed"])


class LandingLog:
    """The log that one source's landing query writes.

    Args:
        name: of the source.
        source: its spec, with a `landing` section.
        store: the pipeline's; the objects go there, unless the source has a full address of its
            own.
        checkpoint: Spark's checkpoint folder; on a disk that outlives the process.
        new_generation: begin a new one if the folder does not own the newest.
        metrics: told of every batch that is landed, and of every query that is started again.
        faults: told when an object is written, and Spark does not know yet.

    Raises:
        ConfigurationError: the newest generation belongs to another checkpoint folder.
    """

    def __init__(
        self,
        name: str,
        source: SourceSpec,
        store: Store,
        checkpoint: Path,
        *,
        new_generation: bool = False,
        metrics: LandingMetrics | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.name, self.checkpoint, self.metrics = name, checkpoint, metrics
        self._source, self._faults = source, faults or NoFaults()
        self._store, self._folder = locate_source(name, source, store)
        checkpoint.mkdir(parents=True, exist_ok=True)
        forgetful = source.landing is not None and source.landing.format in _FORMATS_WITHOUT_OFFSETS
        self.generation, self._note, self._etag = self._claim_generation(new_generation, forgetful)
        self.spark_folder = checkpoint / (f"spark-{self.generation:04d}" if forgetful else "spark")
        self.landed = 0
        self.failure: TidegateError | None = None
        """Why the last batch could not be written, in our own words."""
        self._newest: dict[str, Any] = {"batch": None, "rows": None, "landed_at": None}

    def land_batch(self, batch: int, rows: bytes, count: int) -> bool:
        """Write a batch, unless it is there. Returns whether this call wrote it.

        Raises:
            ConfigurationError: the checkpoint folder is older than what was landed.
            FencedError: another process began a new generation.
        """
        self._note_batch(batch)
        written = self._create_object(self._batch_key(self.generation, batch), rows)
        if written:
            self.landed += count
            if self.metrics is not None:
                self.metrics.record_batch(count)
        else:
            _log.info("landed_before", source=self.name, batch=batch)
        self._newest = {"batch": batch, "rows": count, "landed_at": SYSTEM_CLOCK.wall_ticks()}
        self._faults.reach("land.written")
        return written

    def newest_committed_batch(self) -> int:
        """The newest batch that Spark's checkpoint knows to be done; -1 for none."""
        return max(
            (int(file.name) for file in (self.spark_folder / "commits").glob("[0-9]*")), default=-1
        )

    def report_status(self, state: str, why: str | None = None) -> None:
        """Leave word for `tidegate status`.

        Nothing depends on it, so a store that is away is no matter.
        """
        own = {
            "state": state,
            "why": why,
            "generation": self.generation,
            "landed": self.landed,
            **self._newest,
        }
        body = {
            **own,
            "at": SYSTEM_CLOCK.wall_ticks(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        try:
            self._store.put(self._folder + _STATUS_KEY, json.dumps(body).encode())
        except TransientError as error:
            _log.warning("status_not_written", source=self.name, why=error.message)

    @contextmanager
    def lock_folder(self) -> Iterator[None]:
        """Hold the checkpoint folder: two queries on one folder would undo each other's progress.

        Raises:
            ConfigurationError: another process holds it.
        """
        with (self.checkpoint / f"{_ID_FILE}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigurationError(
                    f"another process lands source {self.name} from {self.checkpoint}",
                    code="landing.busy",
                    kept="everything landed so far",
                    advice="one process per checkpoint folder: stop the other one first",
                ) from error
            yield

    # Batches

    def _note_batch(self, batch: int) -> None:
        """Note that a batch is about to be written, unless it is the newest and comes again."""
        offsets = self._digest_offsets(batch)
        if batch < self._note.batch or (
            batch == self._note.batch and offsets != self._note.offsets
        ):
            raise ConfigurationError(
                f"source {self.name}: the checkpoint folder {self.checkpoint} went back: batch"
                f" {batch} comes again, with other rows, and batch {self._note.batch} is landed"
                " already",
                code="landing.stale_checkpoint",
                kept="everything landed so far; nothing of this batch was written",
                advice=(
                    "give the folder as it was when it was last used; if that is lost, begin with"
                    " --new-generation (docs/landing.md says what the origin gives then)"
                ),
            )
        if batch > self._note.batch:
            self._swap_note(_GenerationNote(self._note.id, batch, offsets))

    def _digest_offsets(self, batch: int) -> str:
        """A digest of what Spark wrote down before it ran the batch."""
        file = self.spark_folder / "offsets" / str(batch)
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""

    def _swap_note(self, note: _GenerationNote) -> None:
        key = self._note_key(self.generation)
        for _ in range(_WRITE_ATTEMPTS):
            try:
                self._etag = self._store.compare_and_swap(key, note.to_bytes(), self._etag)
                self._note = note
                return
            except (OutcomeUnknownError, PreconditionFailedError):
                found = self._store.get(
                    key
                )  # an answer that was lost on its way is there to be read
            if _GenerationNote.from_bytes(found.data) == note:
                self._note, self._etag = note, found.etag
                return
            if found.etag != self._etag:
                raise self._fenced_error()
        raise OutcomeUnknownError.for_uri(self._store.uri(key), f"{_WRITE_ATTEMPTS} tries")

    def _fenced_error(self) -> FencedError:
        return FencedError(
            f"source {self.name}: another process began a generation behind {self.generation}",
            code="landing.fenced",
            kept="everything landed so far; nothing is written behind the new generation",
            advice="one process per source; this one has ended",
        )

    def _create_object(self, key: str, data: bytes) -> bool:
        for _ in range(_WRITE_ATTEMPTS):
            try:
                self._store.create(key, data)
            except PreconditionFailedError:
                return False
            except OutcomeUnknownError:
                # The next try either writes it or finds it; which of the two does not matter.
                continue
            return True
        self._store.create(key, data)
        return True

    def _batch_key(self, generation: int, batch: int) -> str:
        return f"{self._folder}{generation:04d}-{batch:012d}.parquet"

    # Generations

    def _note_key(self, generation: int) -> str:
        return f"{self._folder}_landing/{generation:04d}.json"

    def _claim_generation(
        self, new_generation: bool, forgetful: bool
    ) -> tuple[int, _GenerationNote, str]:
        own, newest = self._read_or_create_id(), self._find_last_generation()
        if newest:
            found = self._store.get(self._note_key(newest))
            note = _GenerationNote.from_bytes(found.data)
            mine = note.id == own and not note.closed
            if mine and not forgetful:
                return newest, note, found.etag
            if not mine and not new_generation and not forgetful:
                raise self._other_folder_error()
            self._close_generation(newest)
        note = _GenerationNote(own)
        return newest + 1, note, self._store.create(self._note_key(newest + 1), note.to_bytes())

    def _other_folder_error(self) -> ConfigurationError:
        return ConfigurationError(
            f"source {self.name} was landed from another checkpoint folder than {self.checkpoint}:"
            " this one does not know what was landed already",
            code="landing.other_checkpoint",
            kept="everything landed so far",
            advice=(
                "give the old folder with --checkpoint; if it is lost: --new-generation. The origin"
                " is then read from where its options begin: rows come again (files; Kafka with"
                " startingOffsets: earliest), or those since the last batch are missing (Kafka's"
                " latest, which is its default)"
            ),
        )

    def _close_generation(self, generation: int) -> None:
        """End a generation for good.

        No batch can be noted any more, and the noted one has an object.
        """
        key = self._note_key(generation)
        while True:
            found = self._store.get(key)
            note = _GenerationNote.from_bytes(found.data)
            if note.closed:
                break
            try:
                self._store.compare_and_swap(
                    key,
                    _GenerationNote(note.id, note.batch, note.offsets, closed=True).to_bytes(),
                    found.etag,
                )
            except (PreconditionFailedError, OutcomeUnknownError):
                continue  # it landed a batch meanwhile, or it is closed: look again
        if note.batch >= 0:
            self._create_object(
                self._batch_key(generation, note.batch), _make_empty_object(self._source)
            )

    def _find_last_generation(self) -> int:
        names = (entry.key[-9:-5] for entry in self._store.list_objects(f"{self._folder}_landing/"))
        return max((int(name) for name in names if name.isdigit()), default=0)

    def _read_or_create_id(self) -> str:
        place = self.checkpoint / _ID_FILE
        if not place.exists():
            fresh = self.checkpoint / f"{_ID_FILE}.{secrets.token_hex(4)}"
            fresh.write_text(secrets.token_hex(16))
            fresh.rename(place)
        return place.read_text()


def read_landing_status(name: str, source: SourceSpec, store: Store) -> dict[str, Any] | None:
    """What the process that lands a source said last; None before the first word."""
    home, folder = locate_source(name, source, store)
    try:
        found: dict[str, Any] = json.loads(home.get(folder + _STATUS_KEY).data)
    except (NotFoundError, ValueError):
        return None
    return found


def _make_empty_object(source: SourceSpec) -> bytes:
    """An object of the source's columns without a row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tidegate.jobs.engine.column_types import to_arrow_type

    sink = io.BytesIO()
    pq.write_table(
        pa.schema(
            {name: to_arrow_type(kind) for name, kind in source.columns.items()}
        ).empty_table(),
        sink,
    )
    return sink.getvalue()
