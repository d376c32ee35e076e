"""The epoch, in the steps of design.md section 2, written against Source, Mover, Store and Sink only.

1. **Plan**: one cut through every source; blocked and far-ahead members are not read.
2. **Survey**: summarise the cut; a slice ends behind its first barrier row.
3. **Decide**: pure; what the cut means.
4. **Move**: files under the attempt's own random id. A crash up to here leaves garbage only.
5. **Seal**: fill the next slot. This is the commit; nothing else is.
6. **Publish** and 7. **Report** follow the log and live elsewhere (`publisher`, the driver's status).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from tidegate.checkpoints.clock import Clock
from tidegate.checkpoints.layout import CheckpointId, new_attempt
from tidegate.checkpoints.lifecycle import Attempt, CheckpointState
from tidegate.checkpoints.log import Lost, SlotLog
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.jobs.engine.counters import accumulate
from tidegate.jobs.engine.faults import Faults
from tidegate.jobs.engine.interfaces import (
    CorruptObjectsError,
    Cut,
    DeadObject,
    Dispatch,
    Dispatched,
    Moved,
    MoveOrder,
    Mover,
    Slice,
    Source,
    seq_of,
)
from tidegate.jobs.engine.standing import DISPATCHER_KINDS, Standing
from tidegate.jobs.eventtime.decider import blocked, decide, hold_back
from tidegate.jobs.eventtime.types import Decision, Survey
from tidegate.jobs.spec.errors import PoisonError, TransientError
from tidegate.jobs.spec.pipeline import PipelineSpec

__all__ = ["Asked", "Author", "Engine", "EpochReport", "Steps"]


class Steps(Protocol):
    """Told about every step: the lease keeper's deadline, the heartbeat and the timings hang on it."""

    def step(self, name: str) -> AbstractContextManager[None]:
        """Enter a step of the epoch."""
        ...

    def attempt(self, epoch: int, name: str) -> None:
        """An attempt at an epoch begins, under this name."""
        ...

    def require_lease(self) -> int:
        """The lease token, just checked. Raises FencedError when the lease is gone."""
        ...

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds per step of the current epoch."""
        ...


@dataclass(frozen=True, slots=True)
class Author:
    """Who writes manifests: stands in each of them."""

    uid: str
    driver: str
    code_version: str


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests of people that this epoch applies; their ids stand in the manifest."""

    ids: tuple[str, ...] = ()
    aborts: tuple[int, ...] = ()
    savepoints: tuple[str, ...] = ()
    attachments: tuple[tuple[str, str], ...] = ()  # (attach | detach | resume, pipe or reducer)

    @property
    def any(self) -> bool:
        """Whether an epoch is asked for even without rows."""
        return bool(self.ids)


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What one call of `Engine.run_epoch` did.

    Attributes:
        sealed: the new checkpoint; None when there was nothing to do or another attempt filled the slot.
        rows: data rows read.
        pending: members with more rows waiting right now, or attachments with rows of their origin to take.
        decision: what was decided, sealed or not.
        lost: another driver's epoch or a restore filled the slot; the standing was reloaded.
        ended: every source is bounded and read to its end.
    """

    sealed: CheckpointId | None
    rows: int
    pending: bool
    decision: Decision
    manifest: Manifest | None = None
    lost: bool = False
    ended: bool = False


SmallTables = Callable[[MoveOrder], dict[str, tuple[FileRef, ...]]]
"""Writes what the driver itself knows (barriers, dead objects) for an attempt; returns table -> files."""


class Engine:
    """Runs epochs of one pipeline, one at a time. Not safe for several threads."""

    def __init__(
        self,
        spec: PipelineSpec,
        log: SlotLog,
        sources: Sequence[Source],
        mover: Mover,
        *,
        author: Author,
        steps: Steps,
        clock: Clock,
        faults: Faults,
        small_tables: SmallTables,
        dispatch: Dispatch | None = None,
    ) -> None:
        self._spec = spec
        self._log = log
        self._sources = tuple(sources)
        self._mover = mover
        self._author = author
        self._steps = steps
        self._clock = clock
        self._faults = faults
        self._small_tables = small_tables
        self._dispatch = dispatch
        self._attempt: Attempt | None = None
        self._aborted: list[str] = []  # since the last sealed epoch, whose manifest names them
        self._corrupt: set[tuple[str, str]] = set()  # (key, ETag) of objects that only reading showed to be corrupt
        self.standing = self.reload()

    def reload(self) -> Standing:
        """Read the head again and stand there."""
        self.standing = Standing.at(self._log.head(), self._spec)
        return self.standing

    def run_epoch(self, asked: Asked = Asked()) -> EpochReport:
        """One epoch, steps 1 to 5. Seals nothing when nothing was read and nothing changed.

        Raises:
            TransientError: the world failed; nothing was sealed, or (SealUndecidedError) the slot decides. Call `reload`.
            FencedError: the lease is gone.
            PoisonError: data that the spec refuses, or a defect.
        """
        self._abandon()
        cut = self._plan()
        cut, survey = self._survey(cut, asked)
        decision = self._decide(survey)
        rows = sum(m.rows for m in survey.members)
        pending = any(m.pending for m in survey.members)
        ended = all(s.done for s in cut.slices) and bool(cut.slices)
        if not self._worth_sealing(cut, decision, asked):
            return EpochReport(None, rows, pending, decision, ended=ended)
        order, moved = self._move(cut, decision, asked)
        return self._seal(order, moved, asked, EpochReport(None, rows, pending, decision, ended=ended))

    def _abandon(self) -> None:
        """An attempt that failed before its PUT was sent is aborted; one that was sent is not, whatever happened then."""
        if self._attempt is not None and self._attempt.state in (CheckpointState.SNAPSHOT, CheckpointState.PERSISTED):
            self._attempt.to(CheckpointState.ABORTED)
            self._aborted.append(self._attempt.checkpoint)
        self._attempt = None

    def _plan(self) -> Cut:
        """Step 1."""
        self._faults.reach("plan")
        with self._steps.step("plan"):
            standing = blocked(self.standing.decider)
            opening = self._opening
            waiting = standing | hold_back(self._spec, self.standing.decider, self.standing.buffered_rows)
            slices: list[Slice] = []
            for source in self._sources:
                limits = self._spec.sources[source.name].limits
                for member in source.members():
                    resume = self.standing.resume.get(str(member))
                    part = source.plan(member, resume, limits, blocked=opening or member in waiting)
                    slices.append(_without(part, self._corrupt))
            return Cut(tuple(slices))

    @property
    def _opening(self) -> bool:
        """Whether this epoch only records the clock: `max_jump` needs one before the first row is judged."""
        return self.standing.head.record is None and any(s.max_jump is not None for s in self._spec.sources.values())

    def _survey(self, cut: Cut, asked: Asked) -> tuple[Cut, Survey]:
        """Step 2: survey, and once more if a barrier row cuts a slice short."""
        self._faults.reach("survey")
        with self._steps.step("survey"), self._as_planned(cut):
            survey = self._mover.survey(cut, self.standing.decider)
            trimmed = self._trim(cut, survey)
            if trimmed != cut:
                survey = self._mover.survey(trimmed, self.standing.decider)
        self._refuse_dead(trimmed)
        return trimmed, replace(
            survey,
            now=self._clock.ticks(),
            buffered_rows=self.standing.buffered_rows,
            released_max=self.standing.released_max,
            aborts=asked.aborts,
            run_start=self.standing.head.record is None,  # a run begins with the log, not with a process
        )

    def _trim(self, cut: Cut, survey: Survey) -> Cut:
        sources = {source.name: source for source in self._sources}
        slices = {s.member: s for s in cut.slices}
        for found in survey.members:
            part = slices[found.member]
            if found.barrier is not None and found.barrier.seq + 1 < part.end:
                cut = cut.with_slice(sources[found.member.source].trim(part, found.barrier.seq + 1))
        return cut

    def _decide(self, survey: Survey) -> Decision:
        """Step 3."""
        self._faults.reach("decide")
        with self._steps.step("decide"):
            return decide(self._spec, self.standing.decider, survey)

    def _worth_sealing(self, cut: Cut, decision: Decision, asked: Asked) -> bool:
        lagging = self._dispatch is not None and bool(self.standing.streams.get("lagging"))
        told = asked.any or lagging or self._opening or any(part.begins for part in cut.slices)
        return not cut.empty or decision.changed or told or self._spec.checkpoint.idle_epochs == "always"

    def _move(self, cut: Cut, decision: Decision, asked: Asked) -> tuple[MoveOrder, Moved]:
        """Step 4."""
        self._faults.reach("move.start")
        head, attempt = self.standing.head, new_attempt()
        self._steps.attempt(head.next_slot, attempt)
        order = MoveOrder(
            cut=cut,
            decision=decision,
            segments=self.standing.segments,
            prefix=self._log.layout.timeline(head.timeline).rstrip("/"),
            tag=f"{head.next_slot:06d}-{attempt}",
            timeline=head.timeline,
            epoch=head.next_slot,
            next_position=self.standing.next_position,
            state=self.standing.decider,
        )
        self._attempt = Attempt(str(CheckpointId(head.timeline, head.next_slot, attempt)))
        self._attempt.to(CheckpointState.SNAPSHOT)
        with self._steps.step("move"):
            with self._as_planned(cut):
                moved = self._mover.move(order)
            self._refuse_changed(cut)
            own = self._small_tables(order)
            sent = self._dispatched(order, moved, asked)
        tables = {*moved.files, *own, *sent.files}
        files = {t: (*moved.files.get(t, ()), *own.get(t, ()), *sent.files.get(t, ())) for t in tables}
        self._attempt.to(CheckpointState.PERSISTED)
        self._faults.reach("move.done")
        return order, replace(moved, files=files, segments=(*moved.segments, *sent.segments), streams=sent.record)

    def _dispatched(self, order: MoveOrder, moved: Moved, asked: Asked) -> Dispatched:
        """What goes to streams; a pipeline that has none any more keeps their state for the day it has them again."""
        if self._dispatch is None:
            kept = tuple(s for s in order.segments if s.kind.startswith(DISPATCHER_KINDS))
            return Dispatched({}, kept, self.standing.streams)
        return self._dispatch.run(order, moved, self.standing.streams, asked.attachments)

    @contextmanager
    def _as_planned(self, cut: Cut) -> Iterator[None]:
        """Whatever goes wrong over an object that was overwritten or removed meanwhile is that change's fault, not the data's.

        An object that only now turns out corrupt is a dead letter of the next plan: its manifest has to say so.
        """
        try:
            yield
        except TransientError:
            raise
        except CorruptObjectsError as error:
            self._refuse_changed(cut, error)
            self._corrupt |= {(p["key"], p["etag"]) for s in cut.slices for p in s.parts if p["key"] in error.keys}
            raise TransientError(
                f"epoch {self.standing.head.next_slot} of {self._spec.name}: {error.message}",
                code=error.code,
                pipeline=self._spec.name,
                kept="everything sealed so far; nothing of this epoch was sealed",
                advice="the epoch is planned again by itself, with dead letters for these objects (or ends, with on_bad: fail)",
            ) from error
        except Exception as error:
            self._refuse_changed(cut, error)
            raise

    def _refuse_changed(self, cut: Cut, cause: Exception | None = None) -> None:
        """Seal nothing that was read from other bytes than the manifest would name: plan again."""
        sources = {source.name: source for source in self._sources}
        found = [dead for part in cut.slices if part.parts for dead in sources[part.member.source].changed(part)]
        if found:
            raise TransientError(
                f"epoch {self.standing.head.next_slot} of {self._spec.name}: {found[0].key} of source {found[0].member} changed "
                f"while it was read: {found[0].detail}",
                code="source.changed",
                pipeline=self._spec.name,
                kept="everything sealed so far; nothing of this epoch was sealed",
                advice="the epoch is planned again by itself; write each object once, under a key of its own",
                retry_after=1.0,
            ) from cause

    def _refuse_dead(self, cut: Cut) -> None:
        """Objects that cannot be read end a source that says ``on_bad: fail``; rows are the mover's to refuse."""
        for dead in (dead for part in cut.slices for dead in part.dead):
            if self._spec.sources[dead.member.source].on_bad == "fail":
                raise PoisonError(
                    f"epoch {self.standing.head.next_slot} of {self._spec.name}: {dead.key} of source {dead.member} cannot be "
                    f"read, from row {dead.seq & 0xFFFFFFFF} on: {dead.reason} ({dead.detail})",
                    code=f"object.{dead.reason}",
                    pipeline=self._spec.name,
                    kept="everything sealed so far; nothing of this epoch was sealed",
                    advice="replace the object or move it out of the source's folder, or set on_bad: dead_letter",
                )

    def _seal(self, order: MoveOrder, moved: Moved, asked: Asked, report: EpochReport) -> EpochReport:
        """Step 5: from here on only the slot decides."""
        attempt = self._attempt
        assert attempt is not None  # noqa: S101 - made by the move
        self._faults.reach("seal.start")
        with self._steps.step("seal"):
            manifest = self._manifest(order, moved, asked, token=self._steps.require_lease())
            attempt.to(CheckpointState.ACKNOWLEDGED)
            outcome = self._log.seal(manifest)
        if isinstance(outcome, Lost):
            attempt.to(CheckpointState.ABORTED, slot_holds_other=True)
            self._aborted.append(attempt.checkpoint)
            self.reload()
            return replace(report, lost=True, manifest=None)
        self._faults.reach("seal.sent")
        attempt.to(CheckpointState.COMPLETE)
        self._aborted.clear()
        head = replace(
            self.standing.head,
            slot=manifest.slot,
            record=manifest,
            sha256=outcome.sha256,
            etag=outcome.etag,
            fork=None,
        )
        self.standing = Standing.at(head, self._spec)
        lagging = bool(moved.streams.get("lagging"))
        return replace(report, sealed=manifest.id, manifest=manifest, pending=report.pending or lagging)

    def _manifest(self, order: MoveOrder, moved: Moved, asked: Asked, *, token: int) -> Manifest:
        if not moved.counters.conserved():
            raise PoisonError(
                f"epoch {order.epoch} of {self._spec.name}: rows do not add up: {asdict(moved.counters)}",
                code="epoch.not_conserved",
                pipeline=self._spec.name,
                kept="the previous checkpoint; this epoch was not sealed",
                advice="report this message; it is a defect of tidegate",
            )
        head = self.standing.head
        decision = decision_record(order.decision)
        return Manifest(
            pipeline=self._spec.name,
            uid=self._author.uid,
            spec_digest=self._spec.digest(),
            code_version=self._author.code_version,
            timeline=order.timeline,
            slot=order.epoch,
            parent=str(head.checkpoint) if head.checkpoint else None,
            parent_sha256=head.sha256,
            attempt=order.tag.partition("-")[2],
            lease_token=token,
            driver=self._author.driver,
            recorded_now=order.decision.now,
            cut={**_kept(self.standing), **{str(s.member): slice_record(s) for s in order.cut.slices}},
            decider=order.decision.after,
            decision=decision,
            barriers=decision["barriers"],
            requests=list(asked.ids),
            counters=accumulate(self.standing.counters, moved.counters),
            segments=[*moved.segments, *self.standing.spliced],
            files={table: list(files) for table, files in sorted(moved.files.items()) if files},
            notes={
                "epoch": asdict(moved.counters),
                "next_position": moved.next_position,
                "released_max": list(_latest(self.standing, moved) or ()) or None,
                "sketches": moved.sketches,
                "bytes_written": moved.bytes_written,
                **({"streams": moved.streams} if moved.streams else {}),
                "savepoints": list(asked.savepoints),
                **({"aborted": list(self._aborted)} if self._aborted else {}),
            },
            timings={name: round(seconds, 6) for name, seconds in self._steps.timings.items()},
            created_at=self._clock.ticks(),
        )


def _without(part: Slice, corrupt: set[tuple[str, str]]) -> Slice:
    """The slice with corrupt objects as dead letters instead of rows to read."""
    bad = [p for p in part.parts if (p.get("key"), p.get("etag")) in corrupt]
    if not bad:
        return part
    detail = "the data pages cannot be read, although the footer can"
    dead = [
        DeadObject(part.member, seq_of(p["ordinal"], p["row_start"]), p["key"], p["etag"], p["size"], "truncated", detail)
        for p in bad
    ]
    whole = sorted([*part.dead, *dead], key=lambda d: d.seq)
    return replace(part, parts=tuple(p for p in part.parts if p not in bad), dead=tuple(whole))


def slice_record(part: Slice) -> dict[str, Any]:
    """A slice as it stands in the manifest: enough to read the same rows again."""
    return {
        "start": part.start,
        "end": part.end,
        "parts": list(part.parts),
        "resume": part.resume,
        "pending": part.pending,
        "done": part.done,
        "dead": [{**asdict(d), "member": str(d.member)} for d in part.dead],
    }


def decision_record(decision: Decision) -> dict[str, Any]:
    """A decision as JSON; its `after` stands in the manifest's own field."""
    return {k: _plain(v) for k, v in asdict(replace(decision, after={})).items() if k != "after"}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.value if hasattr(value, "value") else value


def _kept(standing: Standing) -> dict[str, Any]:
    """Members that are gone keep their last position, so that one that comes back goes on and is not read twice."""
    manifest = standing.head.record
    if manifest is None:
        return {}
    return {
        member: {**part, "start": part["end"], "parts": [], "dead": [], "pending": False} for member, part in manifest.cut.items()
    }


def _latest(standing: Standing, moved: Moved) -> tuple[int, int] | None:
    marks = [m for m in (standing.released_max, moved.released_max) if m is not None]
    return max(marks) if marks else None
