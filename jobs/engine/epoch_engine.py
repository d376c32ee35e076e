"""The epoch, in the steps of design.md section 2, written against Source, Mover, Store and Sink only.

1. **Plan**: one cut through every source; blocked and far-ahead members are not read.
2. **Survey**: summarise the cut; a slice ends behind its first barrier row.
3. **Decide**: pure; what the cut means.
4. **Move**: files under the attempt's own random id. A crash up to here leaves garbage only.
5. **Seal**: fill the next slot. This is the commit; nothing else is.
6. **Publish** and 7. **Report** follow the log and live elsewhere (`publisher`, the driver's
  status).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from tidegate.checkpoints.bucket_layout import CheckpointId, generate_attempt_id
from tidegate.checkpoints.epoch_notes import EpochNotes
from tidegate.checkpoints.host_clock import Clock
from tidegate.checkpoints.manifest import AttemptLifecycle, CheckpointState, FileRef, Manifest
from tidegate.checkpoints.slot_log import SlotLog, SlotTaken
from tidegate.errors import PoisonError, TransientError
from tidegate.jobs.engine.fault_points import Faults
from tidegate.jobs.engine.interfaces import (
    CorruptObjectsError,
    Cut,
    DeadObject,
    DispatchResult,
    MoveOrder,
    Mover,
    MoveResult,
    RowDispatcher,
    Slice,
    Source,
    SurveyedCut,
    join_seq,
    skip_slice_record,
)
from tidegate.jobs.engine.manifest_writer import ManifestAuthor, ManifestDraft
from tidegate.jobs.engine.resume_state import DISPATCHER_KINDS, ResumeState
from tidegate.jobs.eventtime.decider import decide, list_blocked_members, select_members_ahead
from tidegate.jobs.eventtime.decision_types import Decision, Survey
from tidegate.jobs.spec.pipeline import PipelineSpec


class EpochSteps(Protocol):
    """Told about every step.

    The lease keeper's deadline, the heartbeat and the timings hang on it.
    """

    def measure_step(self, name: str) -> AbstractContextManager[None]:
        """Enter a step of the epoch."""
        ...

    def begin_attempt(self, epoch: int, name: str) -> None:
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
class EpochRequests:
    """Requests of people that this epoch applies; their ids stand in the manifest."""

    ids: tuple[str, ...] = ()
    aborts: tuple[int, ...] = ()
    savepoints: tuple[str, ...] = ()
    attachments: tuple[tuple[str, str], ...] = ()  # (attach | detach | resume, pipe or reducer)

    @property
    def wants_epoch(self) -> bool:
        """Whether an epoch is asked for even without rows."""
        return bool(self.ids)


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What one call of `Engine.run_epoch` did.

    Attributes:
        sealed: the new checkpoint; None when there was nothing to do or another attempt filled the
            slot.
        rows: data rows read.
        pending: members with more rows waiting right now, or attachments with rows of their origin
            to take.
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


DriverTableWriter = Callable[[MoveOrder], dict[str, tuple[FileRef, ...]]]
"""Writes what the driver itself knows (barriers, dead objects) for an attempt.

Returns table -> files.
"""


class Engine:
    """Runs epochs of one pipeline, one at a time. Not safe for several threads."""

    def __init__(
        self,
        spec: PipelineSpec,
        log: SlotLog,
        sources: Sequence[Source],
        mover: Mover,
        *,
        author: ManifestAuthor,
        steps: EpochSteps,
        clock: Clock,
        faults: Faults,
        small_tables: DriverTableWriter,
        dispatch: RowDispatcher | None = None,
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
        self._attempt: AttemptLifecycle | None = None
        self._aborted: list[str] = []  # since the last sealed epoch, whose manifest names them
        self._corrupt: set[tuple[str, str]] = (
            set()
        )  # (key, ETag) of objects that only reading showed to be corrupt
        self.standing = self.reload()

    def reload(self) -> ResumeState:
        """Read the head again and stand there."""
        self.standing = ResumeState.from_head(self._log.head(), self._spec)
        return self.standing

    def run_epoch(self, asked: EpochRequests = EpochRequests()) -> EpochReport:
        """One epoch, steps 1 to 5. Seals nothing when nothing was read and nothing changed.

        Raises:
            TransientError: the world failed; nothing was sealed, or (SealUndecidedError) the slot
                decides. Call `reload`.
            FencedError: the lease is gone.
            PoisonError: data that the spec refuses, or a defect.
        """
        self._abandon_attempt()
        cut = self._plan_cut()
        surveyed = self._survey_cut(cut, asked)
        cut, members = surveyed.cut, surveyed.survey.members
        decision = self._decide_epoch(surveyed.survey)
        rows = sum(m.rows for m in members)
        pending = any(m.pending for m in members)
        ended = all(s.done for s in cut.slices) and bool(cut.slices)
        if not self._is_worth_sealing(cut, decision, asked):
            return EpochReport(None, rows, pending, decision, ended=ended)
        order, moved = self._move_cut(surveyed, decision, asked)
        return self._seal_epoch(
            order, moved, asked, EpochReport(None, rows, pending, decision, ended=ended)
        )

    def _abandon_attempt(self) -> None:
        """An attempt that failed before its PUT was sent is aborted.

        One that was sent is not, whatever happened then.
        """
        if self._attempt is not None and self._attempt.state in (
            CheckpointState.SNAPSHOT,
            CheckpointState.PERSISTED,
        ):
            self._attempt.move_to(CheckpointState.ABORTED)
            self._aborted.append(self._attempt.checkpoint)
        self._attempt = None

    def _plan_cut(self) -> Cut:
        """Step 1."""
        self._faults.reach("plan")
        with self._steps.measure_step("plan"):
            standing = list_blocked_members(self.standing.decider)
            opening = self._records_clock_only
            waiting = standing | select_members_ahead(
                self._spec, self.standing.decider, self.standing.buffered_rows
            )
            slices: list[Slice] = []
            for source in self._sources:
                limits = self._spec.sources[source.name].limits
                for member in source.list_members():
                    resume = self.standing.resume.get(str(member))
                    part = source.plan(member, resume, limits, blocked=opening or member in waiting)
                    slices.append(_replace_corrupt_objects(part, self._corrupt))
            return Cut(tuple(slices))

    @property
    def _records_clock_only(self) -> bool:
        """Whether this epoch only records the clock.

        `max_jump` needs one before the first row is judged.
        """
        return self.standing.head.record is None and any(
            s.max_jump is not None for s in self._spec.sources.values()
        )

    def _survey_cut(self, cut: Cut, asked: EpochRequests) -> SurveyedCut:
        """Step 2: survey, and once more if a barrier row cuts a slice short."""
        self._faults.reach("survey")
        with self._steps.measure_step("survey"), self._blame_changed_objects(cut):
            surveyed = self._mover.survey(cut, self.standing.decider)
            trimmed = self._trim_at_barriers(cut, surveyed.survey)
            if trimmed != cut:
                surveyed = self._mover.survey(trimmed, self.standing.decider)
        self._refuse_dead_objects(trimmed)
        survey = replace(
            surveyed.survey,
            now=self._clock.wall_ticks(),
            buffered_rows=self.standing.buffered_rows,
            released_max=self.standing.released_max,
            aborts=asked.aborts,
            run_start=self.standing.head.record
            is None,  # a run begins with the log, not with a process
        )
        return replace(surveyed, survey=survey)

    def _trim_at_barriers(self, cut: Cut, survey: Survey) -> Cut:
        sources = {source.name: source for source in self._sources}
        slices = {s.member: s for s in cut.slices}
        for found in survey.members:
            part = slices[found.member]
            if found.barrier is not None and found.barrier.seq + 1 < part.end:
                cut = cut.with_slice(sources[found.member.source].trim(part, found.barrier.seq + 1))
        return cut

    def _decide_epoch(self, survey: Survey) -> Decision:
        """Step 3."""
        self._faults.reach("decide")
        with self._steps.measure_step("decide"):
            return decide(self._spec, self.standing.decider, survey)

    def _is_worth_sealing(self, cut: Cut, decision: Decision, asked: EpochRequests) -> bool:
        lagging = self._dispatch is not None and bool(self.standing.streams.get("lagging"))
        told = (
            asked.wants_epoch
            or lagging
            or self._records_clock_only
            or any(part.begins for part in cut.slices)
        )
        return (
            not cut.is_empty
            or decision.changed
            or told
            or self._spec.checkpoint.idle_epochs == "always"
        )

    def _move_cut(
        self, surveyed: SurveyedCut, decision: Decision, asked: EpochRequests
    ) -> tuple[MoveOrder, MoveResult]:
        """Step 4."""
        self._faults.reach("move.start")
        head, attempt = self.standing.head, generate_attempt_id()
        self._steps.begin_attempt(head.next_slot, attempt)
        order = MoveOrder(
            cut=surveyed.cut,
            decision=decision,
            segments=self.standing.segments,
            prefix=self._log.layout.timeline_prefix(head.timeline).rstrip("/"),
            tag=f"{head.next_slot:06d}-{attempt}",
            timeline=head.timeline,
            epoch=head.next_slot,
            next_position=self.standing.next_position,
        )
        self._attempt = AttemptLifecycle(str(CheckpointId(head.timeline, head.next_slot, attempt)))
        self._attempt.move_to(CheckpointState.SNAPSHOT)
        with self._steps.measure_step("move"):
            with self._blame_changed_objects(surveyed.cut):
                moved = self._mover.move(order, surveyed)
            self._refuse_changed_objects(surveyed.cut)
            own = self._small_tables(order)
            sent = self._dispatch_moved(order, moved, asked)
        tables = {*moved.files, *own, *sent.files}
        files = {
            t: (*moved.files.get(t, ()), *own.get(t, ()), *sent.files.get(t, ())) for t in tables
        }
        self._attempt.move_to(CheckpointState.PERSISTED)
        self._faults.reach("move.done")
        return order, replace(
            moved, files=files, segments=(*moved.segments, *sent.segments), streams=sent.record
        )

    def _dispatch_moved(
        self, order: MoveOrder, moved: MoveResult, asked: EpochRequests
    ) -> DispatchResult:
        """What goes to streams.

        A pipeline that has none any more keeps their state for the day it has them again.
        """
        if self._dispatch is None:
            kept = tuple(s for s in order.segments if s.kind.startswith(DISPATCHER_KINDS))
            return DispatchResult({}, kept, self.standing.streams)
        return self._dispatch.dispatch_rows(order, moved, self.standing.streams, asked.attachments)

    @contextmanager
    def _blame_changed_objects(self, cut: Cut) -> Iterator[None]:
        """Whatever goes wrong over an object that was overwritten or removed meanwhile is that change's fault, not the data's.

        An object that only now turns out corrupt is a dead letter of the next plan: its manifest
        has to say so.
        """
        try:
            yield
        except TransientError:
            raise
        except CorruptObjectsError as error:
            self._refuse_changed_objects(cut, error)
            self._corrupt |= {
                (p["key"], p["etag"]) for s in cut.slices for p in s.parts if p["key"] in error.keys
            }
            raise TransientError(
                f"epoch {self.standing.head.next_slot} of {self._spec.name}: {error.message}",
                code=error.code,
                pipeline=self._spec.name,
                kept="everything sealed so far; nothing of this epoch was sealed",
                advice=(
                    "the epoch is planned again by itself, with dead letters for these objects (or"
                    " ends, with on_bad: fail)"
                ),
            ) from error
        except Exception as error:
            self._refuse_changed_objects(cut, error)
            raise

    def _refuse_changed_objects(self, cut: Cut, cause: Exception | None = None) -> None:
        """Seal nothing that was read from other bytes than the manifest would name: plan again."""
        sources = {source.name: source for source in self._sources}
        found = [
            dead
            for part in cut.slices
            if part.parts
            for dead in sources[part.member.source].find_changed_objects(part)
        ]
        if found:
            raise TransientError(
                f"epoch {self.standing.head.next_slot} of {self._spec.name}: {found[0].key} of"
                f" source {found[0].member} changed while it was read: {found[0].detail}",
                code="source.changed",
                pipeline=self._spec.name,
                kept="everything sealed so far; nothing of this epoch was sealed",
                advice=(
                    "the epoch is planned again by itself; write each object once, under a key of"
                    " its own"
                ),
                retry_after=1.0,
            ) from cause

    def _refuse_dead_objects(self, cut: Cut) -> None:
        """Objects that cannot be read end a source that says ``on_bad.

        Fail``; rows are the mover's to refuse.
        """
        for dead in (dead for part in cut.slices for dead in part.dead):
            if self._spec.sources[dead.member.source].on_bad == "fail":
                raise PoisonError(
                    f"epoch {self.standing.head.next_slot} of {self._spec.name}: {dead.key} of"
                    f" source {dead.member} cannot be read, from row {dead.seq & 0xFFFFFFFF} on:"
                    f" {dead.reason} ({dead.detail})",
                    code=f"object.{dead.reason}",
                    pipeline=self._spec.name,
                    kept="everything sealed so far; nothing of this epoch was sealed",
                    advice=(
                        "replace the object or move it out of the source's folder, or set on_bad:"
                        " dead_letter"
                    ),
                )

    def _seal_epoch(
        self, order: MoveOrder, moved: MoveResult, asked: EpochRequests, report: EpochReport
    ) -> EpochReport:
        """Step 5: from here on only the slot decides."""
        attempt = self._attempt
        assert attempt is not None  # noqa: S101 - made by the move
        self._faults.reach("seal.start")
        with self._steps.measure_step("seal"):
            manifest = self._build_manifest(order, moved, asked, token=self._steps.require_lease())
            attempt.move_to(CheckpointState.ACKNOWLEDGED)
            outcome = self._log.seal(manifest)
        if isinstance(outcome, SlotTaken):
            attempt.move_to(CheckpointState.ABORTED, slot_holds_other=True)
            self._aborted.append(attempt.checkpoint)
            self.reload()
            return replace(report, lost=True, manifest=None)
        self._faults.reach("seal.sent")
        attempt.move_to(CheckpointState.COMPLETE)
        self._aborted.clear()
        head = replace(
            self.standing.head,
            slot=manifest.slot,
            record=manifest,
            sha256=outcome.sha256,
            etag=outcome.etag,
            fork=None,
        )
        self.standing = ResumeState.from_head(head, self._spec)
        lagging = bool(moved.streams.get("lagging"))
        return replace(
            report, sealed=manifest.id, manifest=manifest, pending=report.pending or lagging
        )

    def _build_manifest(
        self, order: MoveOrder, moved: MoveResult, asked: EpochRequests, *, token: int
    ) -> Manifest:
        if not moved.counters.is_conserved():
            raise PoisonError(
                f"epoch {order.epoch} of {self._spec.name}: rows do not add up:"
                f" {asdict(moved.counters)}",
                code="epoch.not_conserved",
                pipeline=self._spec.name,
                kept="the previous checkpoint; this epoch was not sealed",
                advice="report this message; it is a defect of tidegate",
            )
        draft = ManifestDraft(
            author=self._author,
            pipeline=self._spec.name,
            spec_digest=self._spec.digest(),
            lease_token=token,
            head=self.standing.head,
            attempt=CheckpointId(order.timeline, order.epoch, order.tag.partition("-")[2]),
            cut={**_keep_gone_members(self.standing), **order.cut.to_record()},
            decision=order.decision,
            requests=asked.ids,
            counters=self.standing.counters.add_epoch(moved.counters),
            segments=[*moved.segments, *self.standing.spliced],
            files=moved.files,
            notes=EpochNotes(
                counters=moved.counters,
                next_position=moved.next_position,
                released_max=_max_released(self.standing, moved),
                sketches=moved.sketches,
                bytes_written=moved.bytes_written,
                streams=moved.streams,
                savepoints=asked.savepoints,
                aborted=tuple(self._aborted),
                merge=None,
            ),
            timings={name: round(seconds, 6) for name, seconds in self._steps.timings.items()},
            created_at=self._clock.wall_ticks(),
        )
        return draft.to_manifest()


def _replace_corrupt_objects(part: Slice, corrupt: set[tuple[str, str]]) -> Slice:
    """The slice with corrupt objects as dead letters instead of rows to read."""
    bad = [p for p in part.parts if (p.get("key"), p.get("etag")) in corrupt]
    if not bad:
        return part
    detail = "the data pages cannot be read, although the footer can"
    dead = [
        DeadObject(
            part.member,
            join_seq(p["ordinal"], p["row_start"]),
            p["key"],
            p["etag"],
            p["size"],
            "truncated",
            detail,
        )
        for p in bad
    ]
    whole = sorted([*part.dead, *dead], key=lambda d: d.seq)
    return replace(part, parts=tuple(p for p in part.parts if p not in bad), dead=tuple(whole))


def _keep_gone_members(standing: ResumeState) -> dict[str, Any]:
    """Members that are gone keep their last position, so that one that comes back goes on and is not read twice."""
    manifest = standing.head.record
    if manifest is None:
        return {}
    return {
        member: {**skip_slice_record(part), "pending": False}
        for member, part in manifest.cut.items()
    }


def _max_released(standing: ResumeState, moved: MoveResult) -> tuple[int, int] | None:
    marks = [m for m in (standing.released_max, moved.released_max) if m is not None]
    return max(marks) if marks else None
