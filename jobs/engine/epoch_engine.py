"""The engine runs one epoch at a time: plan, survey, decide, move and seal.

The steps are those of `docs/architecture.md`, section 2:

1. **Plan**: one cut through every source; blocked and far-ahead members are not read.
2. **Survey**: summarise the cut; a slice ends behind its first barrier row.
3. **Decide**: a pure function says what the cut means.
4. **Move**: write files under the random id of the attempt. A crash up to here leaves only garbage.
5. **Seal**: fill the next slot. This alone is the commit.

Publishing (`publisher`) and reporting (the driver's status) follow the log and are not done here.
The engine knows sources, mover, store and dispatcher only by their interfaces.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Protocol

from tidegate.checkpoints.bucket_layout import AttemptFolders, CheckpointId, generate_attempt_id
from tidegate.checkpoints.epoch_notes import EpochNotes
from tidegate.checkpoints.host_clock import Clock
from tidegate.checkpoints.manifest import AttemptLifecycle, CheckpointState, Manifest
from tidegate.checkpoints.slot_log import SlotLog, SlotTaken
from tidegate.errors import PoisonError, TransientError
from tidegate.jobs.eventtime.decider import decide, list_blocked_members, select_members_ahead
from tidegate.jobs.eventtime.decision_types import Decision, Member, Survey
from tidegate.jobs.eventtime.pipeline_clock import WorkedTime, read_pipeline_time
from tidegate.jobs.spec.pipeline import PipelineSpec

from .errors import (
    EPOCH_BREAKS_RULE,
    EPOCH_HAS_CORRUPT_OBJECTS,
    ROWS_NOT_CONSERVED,
    SOURCE_CHANGED,
    BrokenRuleError,
    CorruptObjectsError,
)
from .interfaces import (
    Cut,
    DeadObject,
    DispatchResult,
    Faults,
    MoveOrder,
    Mover,
    MoveResult,
    RowDispatcher,
    Slice,
    Source,
    SurveyedCut,
    TableFiles,
    join_table_files,
    split_seq,
)
from .manifest_writer import (
    DISPATCHER_KINDS,
    ManifestAuthor,
    ManifestDraft,
    ResumeState,
    add_cut_counts,
)


class EpochSteps(Protocol):
    """Observes the steps of an epoch.

    The driver uses it for lease deadlines, heartbeat and timings.
    """

    def measure_step(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which the step `name` is running."""
        ...

    def begin_attempt(self, epoch: int, name: str) -> None:
        """Record that the attempt with the id `name` begins at an epoch."""
        ...

    def require_lease(self) -> int:
        """Check now that this driver holds the lease, and return its token.

        Raises:
            FencedError: another driver has taken it.
            TransientError: its time is over, and the store does not answer.
        """
        ...

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds per step of the current epoch."""
        ...

    def read_worked_ticks(self) -> int:
        """Return for how many ticks the lease was held so far.

        This clock stops while it is not held.
        """
        ...


DriverTableWriter = Callable[[MoveOrder], TableFiles]
"""Writes the rows that only the driver knows (barriers, dead objects): returns table -> files."""


@dataclass(frozen=True)
class EpochPorts:
    """What the engine reads rows from and writes rows with.

    Attributes:
        sources: all sources of the pipeline.
        mover: reads, judges and writes rows.
        driver_tables: writes the small tables of the driver.
        dispatcher: sends released rows to streams; None if the pipeline has no streams.
        map_sources: applies a function to each source and returns the results in their order, when
            all calls have ended; by default one after another.
    """

    sources: Sequence[Source]
    mover: Mover
    driver_tables: DriverTableWriter
    dispatcher: RowDispatcher | None = None
    map_sources: Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]] = map


@dataclass(frozen=True)
class EngineRuntime:
    """The process around the engine: its name in manifests, step observer, clock, fault points.

    Attributes:
        run: number of this run (`DesiredDocument.run`); a greater one than in the log begins a run.
    """

    author: ManifestAuthor
    steps: EpochSteps
    clock: Clock
    faults: Faults
    run: int = 0


@dataclass(frozen=True)
class EpochRequests:
    """The requests of people that an epoch applies.

    Attributes:
        ids: ids of the requests; the manifest names them.
        aborts: ids of barriers to abort.
        cancels: ids up to which all barriers are aborted.
        ctis: (source, event time) of punctuation to add.
        savepoints: names under which the epoch is pinned.
        attachments: (attach | detach | resume, pipe or reducer).
    """

    ids: tuple[str, ...] = ()
    aborts: tuple[int, ...] = ()
    cancels: tuple[int, ...] = ()
    ctis: tuple[tuple[str, int], ...] = ()
    savepoints: tuple[str, ...] = ()
    attachments: tuple[tuple[str, str], ...] = ()

    @property
    def wants_epoch(self) -> bool:
        """Whether an epoch must be sealed even if there are no rows."""
        return bool(self.ids)


@dataclass(frozen=True)
class EpochReport:
    """What one call of `Engine.run_epoch` did.

    Attributes:
        sealed: the new checkpoint; None when there was nothing to do or another attempt filled the
            slot.
        rows: data rows read, without dead letters and rows that `max_jump` set aside.
        pending: members have more rows waiting right now, or attachments have rows of their origin
            to take.
        decision: what was decided, sealed or not.
        manifest: what was sealed; None as `sealed`.
        lost: another attempt, a merge or a restore filled the slot; the engine has reloaded the
            head, and what this epoch read is still `pending`.
        ended: every source is bounded and read to its end, and nothing of that is lost.
        held_back: members that back-pressure has left unread.
    """

    sealed: CheckpointId | None
    rows: int
    pending: bool
    decision: Decision
    manifest: Manifest | None = None
    lost: bool = False
    ended: bool = False
    held_back: tuple[str, ...] = ()


@dataclass(frozen=True)
class EpochAttempt:
    """One attempt at an epoch, from its first file to the answer of the slot."""

    lifecycle: AttemptLifecycle
    order: MoveOrder
    surveyed: SurveyedCut
    requests: EpochRequests


class Engine:
    """Runs epochs of one pipeline, one at a time. Not safe for several threads.

    Attributes:
        resume_state: the state after the newest epoch, from which the next one starts.
    """

    def __init__(
        self, spec: PipelineSpec, log: SlotLog, ports: EpochPorts, runtime: EngineRuntime
    ) -> None:
        self._spec = spec
        self._log = log
        self._ports = ports
        self._sources = {source.name: source for source in ports.sources}
        self._author = runtime.author
        self._steps = runtime.steps
        self._clock = runtime.clock
        self._faults = runtime.faults
        self._run = runtime.run
        # Ids of attempts that failed since the last sealed epoch; the next manifest names them.
        self._aborted: list[str] = []
        # (key, ETag) of objects that turned out to be corrupt only when they were read. The next
        # plan makes dead letters of them.
        self._corrupt: set[tuple[str, str]] = set()
        self._worked = WorkedTime(spec.checkpoint.max_clock_step)
        self._recorded_clock_only = False  # the last attempt did, and was sealed
        self.resume_state = ResumeState.from_head(log.head(), spec)

    @property
    def _epoch_name(self) -> dict[str, Any]:
        """Which epoch an error is about."""
        return {"pipeline": self._spec.name, "epoch": self.resume_state.head.next_slot}

    def reload(self) -> ResumeState:
        """Read the head of the log again, continue from there, and return the state there."""
        before = self.resume_state.head.checkpoint
        self.resume_state = ResumeState.from_head(self._log.head(), self._spec)
        if self.resume_state.head.checkpoint != before:
            # It is not known here how long the driver that sealed this has worked.
            self._worked.begin(sealed_here=False)
        return self.resume_state

    def run_epoch(self, asked: EpochRequests = EpochRequests()) -> EpochReport:
        """Run one epoch, steps 1 to 5. Seals nothing if nothing was read and nothing changed.

        Requests, attachments that lag and ``idle_epochs: always`` seal an epoch without rows. If
        another record fills the slot, nothing is raised: `EpochReport.lost` is set.

        Raises:
            TransientError: the environment failed, or an object changed or turned out corrupt, and
                nothing was sealed: call this again. Or it is undecided whether the epoch was sealed
                (SealUndecidedError): call `reload`.
            FencedError: the lease is lost.
            PoisonError: data that the spec refuses, or a defect.
            ConfigurationError: a source or the store refuses the spec or the credentials.
        """
        try:
            return self._attempt_epoch(asked)
        except Exception:
            # Whatever was away may have been away since the last epoch: no timer counts that.
            self._worked.interrupt()
            raise

    def _attempt_epoch(self, asked: EpochRequests) -> EpochReport:
        clock_only = self._must_record_clock()
        self._recorded_clock_only = False
        state = self.resume_state
        ahead = select_members_ahead(self._spec, state.decider, state.counters.retained)
        cut = self._plan_cut(ahead, clock_only=clock_only)
        # The attempt begins here: tasks write its files while they read the rows.
        folders = self._name_attempt()
        surveyed = self._survey_cut(cut, asked, folders)
        decision = self._decide_epoch(surveyed.survey)
        cut, members = surveyed.cut, surveyed.survey.members
        report = EpochReport(
            sealed=None,
            rows=sum(member.rows for member in members),
            pending=any(member.pending for member in members),
            decision=decision,
            # A cut without slices ends nothing: the first member may still appear.
            ended=all(part.done for part in cut.slices) and bool(cut.slices),
            held_back=tuple(sorted(map(str, ahead))),
        )
        # On a silent stream no row waits for the clock, and nothing has to be written.
        awaited = clock_only and (self.resume_state.head.record is None or report.pending)
        if not awaited and not self._is_worth_sealing(cut, decision, asked):
            # The next epoch starts from the same state, and comes to the same decision or a later
            # one. So it is enough that the worked time is kept.
            return report
        attempt = self._begin_attempt(surveyed, decision, asked, folders)
        try:
            report = self._seal_epoch(attempt, self._move_cut(attempt), report)
            self._recorded_clock_only = clock_only
            return report
        finally:
            # An attempt whose PUT was sent is never aborted by an error: the slot decides.
            lifecycle = attempt.lifecycle
            if lifecycle.state in (CheckpointState.SNAPSHOT, CheckpointState.PERSISTED):
                lifecycle.move_to(CheckpointState.ABORTED)
                self._aborted.append(lifecycle.checkpoint)

    def _plan_cut(self, ahead: set[Member], *, clock_only: bool) -> Cut:
        """Step 1: choose the next slice of every member.

        Members `ahead` are not read; with `clock_only` none is.
        """
        self._faults.reach("plan")
        state = self.resume_state
        with self._steps.measure_step("plan"):
            unread = list_blocked_members(state.decider) | ahead

            def plan_members(source: Source) -> list[Slice]:
                """Plan the slice of each member of a source."""
                limits = self._spec.sources[source.name].limits
                # Also what may not be read is planned: no timer expires that waits for a member
                # with rows, so the decider has to know who has some.
                return [
                    source.plan(
                        member,
                        state.resume.get(str(member)),
                        limits,
                        blocked=clock_only or member in unread,
                    ).replace_corrupt_objects(self._corrupt)
                    for member in source.list_members()
                ]

            found = self._ports.map_sources(plan_members, self._ports.sources)
            return Cut(tuple(chain.from_iterable(found)))

    def _must_record_clock(self) -> bool:
        """Whether rows have to wait until an epoch has recorded the wall clock.

        `max_jump` judges rows by the wall clock that the epoch before has recorded. After a long
        silence or an outage that one is so old that every new row would seem to be in the future.
        """
        if self._recorded_clock_only:
            # Now rows are read, however small `max_jump` is, or none would ever be.
            return False
        jumps = [s.max_jump for s in self._spec.sources.values() if s.max_jump is not None]
        time = read_pipeline_time(self.resume_state.decider)
        return bool(jumps) and (time is None or self._clock.wall_ticks() - time.wall >= min(jumps))

    def _name_attempt(self) -> AttemptFolders:
        """Return the folders of a new attempt at the next slot."""
        # The id is random, so that no attempt at the slot, of this driver or another, writes where
        # an earlier one has written. What loses is garbage, and retention deletes it.
        head = self.resume_state.head
        checkpoint = CheckpointId(head.timeline, head.next_slot, generate_attempt_id())
        return AttemptFolders(self._log.layout, checkpoint)

    def _survey_cut(self, cut: Cut, asked: EpochRequests, folders: AttemptFolders) -> SurveyedCut:
        """Step 2: survey, and once more if a barrier row cuts a slice short."""
        self._faults.reach("survey")
        state = self.resume_state

        def survey_rows(chosen: Cut) -> SurveyedCut:
            """Survey a cut from where the newest epoch has ended."""
            return self._ports.mover.survey(
                chosen, state.decider, folders, state.released_max, state.next_position
            )

        with self._steps.measure_step("survey"), self._blame_changed_objects(cut):
            surveyed = survey_rows(cut)
            # Once is enough: a slice that ends behind its first barrier has no second one.
            trimmed = self._trim_at_barriers(cut, surveyed.survey)
            if trimmed != cut:
                surveyed = survey_rows(trimmed)
        self._refuse_dead_objects(trimmed)
        # Only here, because a survey may take minutes. The sources have answered by now, so all
        # time up to here was worked.
        now, time = self._clock.wall_ticks(), read_pipeline_time(state.decider)
        survey = replace(
            surveyed.survey,
            now=now,
            worked=self._worked.count(
                self._steps.read_worked_ticks(), now - time.wall if time else 0
            ),
            buffered_rows=state.counters.retained,
            released_max=state.released_max,
            aborts=asked.aborts,
            cancels=asked.cancels,
            ctis=asked.ctis,
            # A run begins with the log or after a stop, not with a process.
            run_start=state.head.record is None or self._run > state.run,
        )
        return replace(surveyed, survey=survey)

    def _trim_at_barriers(self, cut: Cut, survey: Survey) -> Cut:
        """Let each slice end behind its first barrier row (`docs/decisions/0001-*`)."""
        slices = {part.member: part for part in cut.slices}
        for member in survey.members:
            part = slices[member.member]
            if member.barrier is not None and member.barrier.seq + 1 < part.end:
                source = self._sources[part.member.source]
                cut = cut.with_slice(source.trim(part, member.barrier.seq + 1))
        return cut

    def _decide_epoch(self, survey: Survey) -> Decision:
        """Step 3: decide what the cut means."""
        self._faults.reach("decide")
        with self._steps.measure_step("decide"):
            return decide(self._spec, self.resume_state.decider, survey)

    def _is_worth_sealing(self, cut: Cut, decision: Decision, asked: EpochRequests) -> bool:
        """Whether the epoch changes anything; if not, the next one decides the same again."""
        attachments_lag = self._ports.dispatcher is not None and bool(
            self.resume_state.streams.get("lagging")
        )
        return (
            not cut.is_empty
            or decision.changed
            or asked.wants_epoch
            # An attachment takes old rows of its origin, epoch by epoch, also if no new ones come.
            or attachments_lag
            # Another look would begin somewhere else, and rows in between would be in neither.
            or any(part.begins for part in cut.slices)
            or self._spec.checkpoint.idle_epochs == "always"
        )

    def _begin_attempt(
        self,
        surveyed: SurveyedCut,
        decision: Decision,
        asked: EpochRequests,
        folders: AttemptFolders,
    ) -> EpochAttempt:
        self._faults.reach("move.start")
        checkpoint = folders.attempt
        self._steps.begin_attempt(checkpoint.slot, checkpoint.attempt)
        order = MoveOrder(
            cut=surveyed.cut,
            decision=decision,
            segments=self.resume_state.segments,
            folders=folders,
            next_position=self.resume_state.next_position,
        )
        lifecycle = AttemptLifecycle(str(checkpoint))
        lifecycle.move_to(CheckpointState.SNAPSHOT)
        return EpochAttempt(lifecycle, order, surveyed, asked)

    def _move_cut(self, attempt: EpochAttempt) -> MoveResult:
        """Step 4: write all files of the attempt."""
        order, cut = attempt.order, attempt.surveyed.cut
        with self._steps.measure_step("move"):
            with self._blame_changed_objects(cut):
                moved = self._ports.mover.move(order, attempt.surveyed)
            # Also after a move that succeeded: an object may have been replaced by one that can be
            # read as well, and the manifest would name an ETag with other rows.
            self._refuse_changed_objects(cut)
            # Behind the mover: the dispatcher sends on what the mover has released.
            driver_files = self._ports.driver_tables(order)
            dispatched = self._dispatch_moved(order, moved, attempt.requests)
        files = join_table_files(moved.files, driver_files, dispatched.files)
        # All files are durable from here on, and no reader sees them: no slot names them yet.
        attempt.lifecycle.move_to(CheckpointState.PERSISTED)
        self._faults.reach("move.done")
        segments = (*moved.segments, *dispatched.segments)
        counters = add_cut_counts(self._spec, cut, moved.counters, dispatched.counts)
        return replace(
            moved, files=files, segments=segments, streams=dispatched.record, counters=counters
        )

    def _dispatch_moved(
        self, order: MoveOrder, moved: MoveResult, asked: EpochRequests
    ) -> DispatchResult:
        """Send what was released to streams.

        A pipeline without streams keeps the state of earlier ones, in case they are added again.
        """
        streams = self.resume_state.streams
        if self._ports.dispatcher is None:
            kept = tuple(s for s in order.segments if s.kind.startswith(DISPATCHER_KINDS))
            return DispatchResult({}, kept, streams)
        return self._ports.dispatcher.dispatch_rows(order, moved, streams, asked.attachments)

    @contextmanager
    def _blame_changed_objects(self, cut: Cut) -> Iterator[None]:
        """Report a failed read as a changed object if an object of the cut has changed meanwhile.

        An object that turns out to be corrupt becomes a dead letter of the next plan, because the
        manifest has to name it.
        """
        try:
            yield
        except TransientError:
            raise
        except CorruptObjectsError as error:
            # First the harmless explanation: the object is being written again.
            self._refuse_changed_objects(cut, error)
            self._corrupt |= {
                (p["key"], p["etag"]) for s in cut.slices for p in s.parts if p["key"] in error.keys
            }
            raise EPOCH_HAS_CORRUPT_OBJECTS(**self._epoch_name, detail=error.message) from error
        except Exception as error:
            self._refuse_changed_objects(cut, error)
            if isinstance(error, BrokenRuleError):
                raise EPOCH_BREAKS_RULE(**self._epoch_name, detail=error.message) from error
            raise

    def _refuse_changed_objects(self, cut: Cut, cause: Exception | None = None) -> None:
        """Refuse rows that were read from other bytes than the manifest would name."""

        def find_changed(source: Source) -> list[DeadObject]:
            """Look at the slices of a source, one after another."""
            own = [part for part in cut.slices if part.member.source == source.name and part.parts]
            return [dead for part in own for dead in source.find_changed_objects(part)]

        found = self._ports.map_sources(find_changed, self._ports.sources)
        changed = list(chain.from_iterable(found))
        if changed:
            first = changed[0]
            raise SOURCE_CHANGED(
                **self._epoch_name, key=first.key, member=first.member, detail=first.detail
            ) from cause

    def _refuse_dead_objects(self, cut: Cut) -> None:
        """Refuse unreadable objects of a source with `on_bad: fail`; the mover refuses rows."""
        for dead in (dead for part in cut.slices for dead in part.dead):
            if self._spec.sources[dead.member.source].on_bad == "fail":
                # The code names the reason, so that alerts can distinguish them.
                raise PoisonError(
                    f"epoch {self.resume_state.head.next_slot} of {self._spec.name}: {dead.key} of"
                    f" source {dead.member} cannot be read, from row {split_seq(dead.seq)[1]} on:"
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
        self, attempt: EpochAttempt, moved: MoveResult, report: EpochReport
    ) -> EpochReport:
        """Step 5: fill the slot; from the PUT on only the slot decides."""
        self._faults.reach("seal.start")
        with self._steps.measure_step("seal"):
            # As late as possible. A lease that is lost right after this check does no harm either:
            # the slot takes one manifest, whichever process sends it.
            manifest = self._build_manifest(attempt, moved, token=self._steps.require_lease())
            # Before the PUT: whatever happens from here on, it may have arrived.
            attempt.lifecycle.move_to(CheckpointState.ACKNOWLEDGED)
            outcome = self._log.seal(manifest)
        if isinstance(outcome, SlotTaken):
            attempt.lifecycle.move_to(CheckpointState.ABORTED, slot_holds_other=True)
            self._aborted.append(attempt.lifecycle.checkpoint)
            self.reload()
            # Nothing of this cut was sealed: all of it has to be read again behind the new head,
            # also if it was the end of every source.
            return replace(report, lost=True, ended=False, pending=True)
        self._faults.reach("seal.sent")
        attempt.lifecycle.move_to(CheckpointState.COMPLETE)
        self._aborted.clear()
        # What the next epoch starts from is in memory: reading it back would cost two requests.
        head = replace(
            self.resume_state.head,
            slot=manifest.slot,
            record=manifest,
            sha256=outcome.sha256,
            etag=outcome.etag,
            fork=None,
        )
        self.resume_state = ResumeState.from_head(head, self._spec)
        self._worked.begin(sealed_here=True)
        pending = report.pending or bool(moved.streams.get("lagging"))
        return replace(report, sealed=manifest.id, manifest=manifest, pending=pending)

    def _build_manifest(self, attempt: EpochAttempt, moved: MoveResult, *, token: int) -> Manifest:
        order, asked, state = attempt.order, attempt.requests, self.resume_state
        if not moved.counters.is_conserved():
            raise ROWS_NOT_CONSERVED(**self._epoch_name, counters=asdict(moved.counters))
        draft = ManifestDraft(
            author=self._author,
            pipeline=self._spec.name,
            spec_digest=self._spec.digest(),
            lease_token=token,
            head=state.head,
            attempt=order.folders.attempt,
            cut={**state.list_gone_members(), **order.cut.to_record()},
            survey=attempt.surveyed.survey.to_record(),
            decision=order.decision,
            requests=asked.ids,
            counters=state.counters.add_epoch(moved.counters),
            segments=[*moved.segments, *state.spliced],
            files=moved.files,
            notes=EpochNotes(
                epoch=moved.counters,
                next_position=moved.next_position,
                released_max=max(
                    filter(None, (state.released_max, moved.released_max)), default=None
                ),
                sketches=moved.sketches,
                bytes_written=moved.bytes_written,
                streams=moved.streams,
                savepoints=asked.savepoints,
                aborted=tuple(self._aborted),
                splice=None,
                run=max(self._run, state.run),
            ),
            timings={name: round(seconds, 6) for name, seconds in self._steps.timings.items()},
            created_at=self._clock.wall_ticks(),
        )
        return draft.to_manifest()
