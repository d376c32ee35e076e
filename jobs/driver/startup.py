"""Before the first epoch: a scratch folder, the right to drive, and the checkpoint to start from.

Two things keep a driver away: another driver that holds the lease, and `desired.json`, where an
operator or a restore has stopped the pipeline. A standby waits until neither does; any other driver
ends with an error.

To continue from the newest checkpoint needs no decision. Everything else, skipping a damaged
checkpoint included, is a restore: it writes a fork record with who and why (`docs/architecture.md`,
section 2, "Bad checkpoints").
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog
from tenacity import Retrying

from tidegate import __version__
from tidegate.checkpoints.alert_delivery import find_alerts_mistake, find_usable_alerts
from tidegate.checkpoints.batch_notes import BatchNotes
from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.checkpoint_specs import (
    SealedSpecs,
    require_compatible_spec,
    require_fitting_tables,
    write_spec,
)
from tidegate.checkpoints.driver_requests import (
    DesiredDocument,
    DesiredState,
    end_abandoned_recovery,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.host_clock import PeriodicThread
from tidegate.checkpoints.incidents import LOOK_EVERY, announce_incidents
from tidegate.checkpoints.lease import Lease, LeaseHeldError, LeaseWait, read_lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.pipeline_identity import (
    ProcessIdentity,
    ensure_identity,
    refuse_copied_store,
)
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store, StoreDeniedError
from tidegate.checkpoints.store_probe import require_atomic_writes, require_honest_store
from tidegate.checkpoints.verify import (
    CheckpointVerdict,
    Verification,
    condemn_if_damaged,
    condemn_with_ancestors,
    verify_checkpoint,
)
from tidegate.errors import FencedError, TidegateError, TransientError
from tidegate.jobs.engine.interfaces import WorkRunner
from tidegate.jobs.spec.job_spec import SupervisedSpec
from tidegate.jobs.spec.pipeline import PipelineSpec

from .deploy_turn import DeployTurn
from .epoch_listeners import Receivers
from .epoch_loop import RunOutcome
from .error_classification import log_background_failure
from .errors import (
    CHECKPOINT_DAMAGED,
    CHECKPOINT_LEFT,
    NO_WHOLE_CHECKPOINT,
    OTHER_KIND,
    UNWANTED,
)
from .housekeeping import Housekeeper
from .status_reporter import DriverSteps, StatusReporter

_log = structlog.get_logger("tidegate.driver")

# Temporary scratch folders are named like this; the lock file lies in each scratch folder.
WORK_PREFIX, _LOCK_FILE = "tidegate-", ".lock"
_YOUNG_FOLDER = 60.0  # seconds
ALIVE_FILE = "alive"  # file in the work folder
# Seconds for the last look for incidents. What it has not sent by then, the sweep sends.
_LAST_LOOK_LIMIT = 5.0
_LOOK_EVERY = 2.0  # seconds between two reads of the desired state of a stopped pipeline
ENDED_BEFORE_LEASE = RunOutcome(
    "stopped", "a signal asked for it, before it was this one's turn to drive"
)


def touch_alive_file(alive: Path) -> None:
    """Show a supervisor that this process is not stuck: a liveness probe reads the file's age.

    A file that cannot be touched raises no error.
    """
    with contextlib.suppress(OSError):
        alive.touch()


@dataclass(frozen=True)
class LaunchOptions:
    """How to run a pipeline or a job, as opposed to what (the spec).

    Attributes:
        store_url: ``s3://bucket/prefix`` or a folder.
        recover_to: ``latest``, ``latest_healthy`` or a checkpoint id; anything but ``latest`` is a
            restore.
        standby: wait, with the imports done and a pipeline's Spark warm, until the lease is free
            and the pipeline or job should run, instead of ending with an error.
        ends_when_stopped: a standby ends with the error when it is stopped, because another program
            starts drivers. It still waits while a restore is under way.
        asked_by: the person who starts this run. The run then clears an earlier ``tidegate stop``.
        deploy: the copy that is run; None: the run has no part in deploys.
    """

    store_url: str
    _: KW_ONLY
    recover_to: str = "latest"
    standby: bool = False
    ends_when_stopped: bool = False
    asked_by: str | None = None
    deploy: DeployTurn | None = None


class LeasedSession(ABC):
    """The threads and parts that a pipeline and a job have while the lease is held.

    The lease is renewed and the bucket maintained from here on; the status is written from
    `run_to_end` on. `close` has to be called, also if the run fails. A subclass makes `_listeners`.
    """

    _listeners: Receivers

    def __init__(
        self,
        spec: SupervisedSpec,
        store: Store,
        lease: Lease,
        digest: str,
        deploy: DeployTurn | None = None,
        run_work: WorkRunner | None = None,
    ) -> None:
        self._deploy = deploy
        self._slot_log = SlotLog(store, spec.name)
        self._steps = DriverSteps(lease, spec.checkpoint.max_clock_step)
        self._steps.start()
        self._housekeeper = Housekeeper(spec, self._slot_log, run=run_work).start()
        facts = {
            "pipeline": spec.name,
            "pid": os.getpid(),
            "code_version": __version__,
            "spec_digest": digest,
        }
        silent_after = spec.supervision.silent_after
        self._status = StatusReporter(store, self._steps, facts, silent_after=silent_after)
        self._supervised = spec
        self._alerts = PeriodicThread("tidegate-alerts", self._announce, LOOK_EVERY)
        self._alerts_mistake = find_alerts_mistake(spec)
        if find_usable_alerts(spec):
            self._alerts.start()

    def run_to_end(self) -> RunOutcome:
        """Run until something ends it, and write and return how it ended.

        Raises:
            TidegateError: what ended the run; it is in the status.
        """
        self._status.start_reporting(self._collect_live_facts)
        try:
            outcome = self._run()
        except Exception as error:
            reported = judge_failure(self._deploy, self._slot_log.store, self._classify(error))
            self._note_end("failed", reported)
            raise reported from error
        if self._deploy is not None:
            # A run that ended well has had its first round; else the next driver tells.
            with contextlib.suppress(TransientError, StoreDeniedError):
                self._deploy.confirm(self._slot_log.store)
        self._note_end(outcome.state, why=outcome.why)
        return outcome

    def close(self) -> None:
        """Stop the threads and release the lease, so that the next driver need not wait.

        If the store does not answer or refuses, the lease expires by itself.
        """
        # The end of the process cuts off what takes longer.
        self._alerts.stop(1.0)
        self._housekeeper.stop(5.0)
        self._status.stop(10.0)
        self._steps.stop()
        with contextlib.suppress(TransientError, StoreDeniedError):
            self._steps.lease.release()
        # Last: a collector that does not answer must not keep the next driver waiting.
        self._listeners.close()

    @property
    def _trouble(self) -> TidegateError | None:
        """What keeps this process from its duties beside the rows; it is in each status."""
        return self._steps.trouble or self._housekeeper.trouble or self._alerts_mistake

    @abstractmethod
    def _run(self) -> RunOutcome:
        """Select the head of the log, and process rows until something ends the run."""

    @abstractmethod
    def _collect_live_facts(self) -> dict[str, object]:
        """Return the facts of the status that are read for each document."""

    @abstractmethod
    def _classify(self, error: Exception) -> TidegateError:
        """Return the error that the status shows and the run raises."""

    def _note_end(
        self, state: str, error: TidegateError | None = None, why: str | None = None
    ) -> None:
        self._status.set_state(state, error=error, why=why)
        if find_usable_alerts(self._supervised):
            # A receiver or a store that does not answer must not keep the next driver waiting.
            last = threading.Thread(target=self._announce, name="tidegate-alerts", daemon=True)
            last.start()
            last.join(_LAST_LOOK_LIMIT)
            if last.is_alive():
                _log.warning("not_announced", why=f"no answer within {_LAST_LOOK_LIMIT:g} s")
        self._listeners.on_end(error)

    def _announce(self) -> None:
        """Announce incidents; what fails is logged, and the next look tries it again."""
        try:
            for sent in announce_incidents(self._slot_log, self._supervised):
                if sent.error is None:
                    _log.info("announced", alert=sent.alert.title, receiver=sent.receiver)
                else:
                    log_background_failure("not_announced", "announcing incidents", sent.error)
        except Exception as error:
            log_background_failure("not_announced", "announcing incidents", error)


def judge_failure(deploy: DeployTurn | None, store: Store, error: TidegateError) -> TidegateError:
    """Return the error with which a run ends; of a deploy that is tried, that it has failed."""
    return error if deploy is None else deploy.judge_failure(store, error)


@dataclass
class LeaderElection:
    """Waits until this process may drive, takes the lease, and runs a session while it is held.

    Attributes:
        store: the store of the pipeline or job.
        pipeline: its name.
        stop: set when the process should end.
        retry: waits for a store that does not answer.
        options: whether this is a standby, and who started it.
        alive: the file to touch while waiting.
    """

    store: Store
    pipeline: str
    stop: threading.Event
    retry: Retrying
    options: LaunchOptions
    alive: Path
    _desired: DesiredDocument = field(default_factory=DesiredDocument, init=False)

    def run_session(
        self,
        warm_up: Callable[[], object],
        open_session: Callable[[str, Lease], LeasedSession],
    ) -> RunOutcome:
        """Wait for the lease, run a session to its end, and return how it ended.

        Args:
            warm_up: what to do before the lease is taken.
            open_session: makes the session from the uid and the lease.

        Raises:
            TidegateError: the store is not honest or was copied, or as in `acquire_lease`, or what
                ended the session.
        """
        self.retry(require_honest_store, self.store)
        self.retry(require_atomic_writes, self.store)
        uid = self.retry(ensure_identity, self.store, self.pipeline)
        warm_up()
        if self.options.standby:
            _log.info("standing_by", pipeline=self.pipeline)
        lease = self.acquire_lease(uid)
        if lease is None:
            return ENDED_BEFORE_LEASE
        self._begin_deploy(lease)
        with contextlib.closing(open_session(uid, lease)) as session:
            outcome = session.run_to_end()
            if outcome.state == "finished":
                self.note_finished(lease, outcome.why)
            return outcome

    def _begin_deploy(self, lease: Lease) -> None:
        """Begin with the deployed copy, or give the lease back if another one counts by now."""
        if self.options.deploy is None:
            return
        with contextlib.ExitStack() as giving_back:
            giving_back.callback(lease.release)
            self.retry(self.options.deploy.begin, self.store)
            giving_back.pop_all()

    def clear_stop(self, who: str) -> None:
        """Clear a previous ``tidegate stop``, because a person started this run.

        Does nothing during a restore, or if no desired state was ever recorded.

        Raises:
            ConfigurationError: the store is a copy; where a move has stopped it, it stays stopped.
        """
        desired = self.retry(read_desired_state, self.store, self.pipeline)
        if desired.keeps_drivers_away and desired.state is DesiredState.STOPPED:
            self.retry(refuse_copied_store, self.store, self.pipeline)
            self.retry(
                set_desired_state,
                self.store,
                self.pipeline,
                DesiredState.RUN,
                who=who,
                why="tidegate run",
            )

    def wait_until_wanted(self) -> bool:
        """Wait until the pipeline should run; return False if the process should end.

        A restore that its process has abandoned is ended on the way.

        Raises:
            FencedError: the pipeline should not run, and this driver is not a standby, or is one
                that ends when the pipeline is stopped.
            ConfigurationError: as in `clear_stop`.
            TransientError: the store did not answer for ten minutes, or until `stop` was set.
        """
        if self.options.asked_by is not None:
            self.clear_stop(self.options.asked_by)
        while not self.retry(self._is_wanted):
            if self.stop.wait(_LOOK_EVERY):
                return False
        return True

    def acquire_lease(self, uid: str) -> Lease | None:
        """Return the lease, or None if a standby should end.

        Raises:
            FencedError: as in `wait_until_wanted`; or another driver holds the lease, and this one
                is not a standby.
            ConfigurationError: the lease belongs to a pipeline with another uid, or the pipeline
                was moved to another address meanwhile.
            TransientError: as in `wait_until_wanted`.
        """
        while True:
            try:
                lease = self._acquire_with_retry(uid)
            except LeaseHeldError:
                if self.options.standby and self.stop.is_set():
                    return None
                raise
            # A person who stops the pipeline first writes the desired state and then looks for a
            # driver. So either they see this lease, or we see the new state here.
            with contextlib.ExitStack() as giving_back:
                giving_back.callback(lease.release)
                # A move keeps the uid, so the lease does not show that it happened while we waited.
                self.retry(refuse_copied_store, self.store, self.pipeline)
                if self.retry(self._is_wanted):
                    giving_back.pop_all()
                    return lease

    def note_finished(self, lease: Lease, why: str) -> None:
        """Note that no driver is wanted, if this is a standby and the store answers.

        Without the note the next standby takes the lease, finds nothing to do, and finishes too.
        Nothing is noted without the lease: the next driver, or a restore, may be wanted by then.
        """
        store, name, stopped = self.store, self.pipeline, DesiredState.STOPPED

        def note() -> None:
            """Note it with the lease."""
            lease.ensure_held()
            set_desired_state(store, name, stopped, who="driver", why=why)

        if not self.options.standby:
            return
        try:
            self.retry(note)
        except (TransientError, FencedError, StoreDeniedError) as error:
            _log.warning("still_wanted", pipeline=name, error=str(error))

    def _acquire_with_retry(self, uid: str) -> Lease:
        acquire = partial(
            Lease.acquire,
            self.store,
            self.pipeline,
            ProcessIdentity.this_process(),
            uid=uid,
            wait=LeaseWait(self.options.standby, self._touch_and_check_stop, self._is_wanted),
        )
        # A standby may wait for days. Its patience with the store begins with each trouble.
        while self.options.standby:
            try:
                return acquire()
            except TransientError:
                self.stop.wait(_LOOK_EVERY)
                self.retry(read_lease, self.store, self.pipeline)
        return self.retry(acquire)

    def _touch_and_check_stop(self) -> bool:
        touch_alive_file(self.alive)
        return self.stop.is_set()

    def _is_wanted(self) -> bool:
        touch_alive_file(self.alive)
        # Where there is no Airflow, no sweep does this.
        desired = end_abandoned_recovery(self.store, self.pipeline, who="driver")
        before, self._desired = self._desired, desired
        if not desired.keeps_drivers_away:
            return True
        who = f"{desired.who or 'no one'}{f': {desired.why}' if desired.why else ''}"
        error: FencedError = UNWANTED(pipeline=self.pipeline, state=desired.state, who=who)
        stopped = desired.state is DesiredState.STOPPED
        if not self.options.standby or (self.options.ends_when_stopped and stopped):
            raise error
        if before != desired:
            _log.info(
                "kept_waiting", pipeline=self.pipeline, why=error.message, advice=error.advice
            )
        return False


def select_start_checkpoint(
    spec: PipelineSpec, log: SlotLog, lease: Lease, recover_to: str
) -> None:
    """Make the checkpoint that `recover_to` asks for the head of the log, and keep the spec.

    Raises:
        PoisonError, ConfigurationError: as in `select_head`; also if the spec does not fit the
            state or the tables.
    """
    head = log.head()
    if head.record is None and head.fork is not None:
        require_fitting_tables(log, spec)
    select_head(spec, log, lease, recover_to, partial(_require_spec_fit, spec, log))
    # Last: what was refused has written nothing, so later specs are not compared with it.
    write_spec(log.store, spec)


def select_head(
    spec: SupervisedSpec,
    log: SlotLog,
    lease: Lease,
    recover_to: str,
    require_fit: Callable[[Manifest], None] = lambda _manifest: None,
) -> None:
    """Make the checkpoint that `recover_to` asks for the head of the log.

    Only for ``latest`` the files are looked for, without reading them unless the head is condemned:
    a damaged head is condemned, and the newest whole checkpoint takes its place. ``latest_healthy``
    goes by the quality runs; a checkpoint id is taken as it is, unless it is condemned. A restore
    is written if another checkpoint than the head is chosen. An empty log stays as it is.

    Args:
        spec: the pipeline, or the job.
        log: its log.
        lease: held by this driver.
        recover_to: ``latest``, ``latest_healthy``, or what `CheckpointCatalog.resolve` takes.
        require_fit: raises if the spec does not fit the state of the chosen checkpoint.

    Raises:
        PoisonError: the newest checkpoint is damaged and the spec says ``on_bad_checkpoint: stop``,
            or no checkpoint is proven whole.
        ConfigurationError: `recover_to` is not a checkpoint, or is a condemned one.
        FencedError: the lease is lost.
    """
    head = log.head()
    if head.record is None or head.checkpoint is None:
        return
    if recover_to == "latest":
        # Sizes do not show why a checkpoint was condemned if a wrong byte was the evidence.
        is_condemned = str(head.checkpoint) in RootsFile(log.store, log.pipeline).read().condemned
        verification = verify_checkpoint(log, head.checkpoint, checksums=is_condemned)
        # A store that does not answer proves nothing: only definite evidence condemns.
        if verification.verdict is not CheckpointVerdict.DAMAGED:
            require_fit(head.record)
            return
        target = _find_undamaged_checkpoint(spec, log, verification)
        why = f"{head.checkpoint} is damaged"
    else:
        target = CheckpointCatalog(log).resolve(recover_to)
        why = f"started with recover_to={recover_to}"
    require_fit(log.open_checkpoint(target).epoch)
    if target != head.checkpoint:
        plan = plan_restore(log, target, spec=spec)
        who, request_id = f"driver {lease.holder.driver}", secrets.token_hex(8)
        commit_restore(log, lease, plan, request_id=request_id, who=who, why=why)
        _log.warning(
            "restored",
            pipeline=spec.name,
            to=str(target),
            epochs_rewound=plan.epochs_rewound,
            why=why,
        )


def _require_spec_fit(spec: PipelineSpec, log: SlotLog, manifest: Manifest) -> None:
    """Log what a changed spec keeps and drops, and refuse a spec that would misread the state."""
    if BatchNotes.from_manifest(manifest) is not None:
        raise OTHER_KIND(pipeline=spec.name, found="job", given="pipeline")
    if SealedSpecs(log).compare_with(spec, manifest) is None:
        _log.warning(
            "spec_changed",
            pipeline=spec.name,
            what="unknown",
            why=f"the spec that wrote {manifest.id} was not kept",
        )
        return
    for change in require_compatible_spec(log, spec, manifest):
        _log.warning(
            "spec_changed",
            pipeline=spec.name,
            what=change.what,
            verdict=change.verdict.value,
            why=change.why,
        )


def _find_undamaged_checkpoint(
    spec: SupervisedSpec, log: SlotLog, damaged: Verification
) -> CheckpointId:
    """Condemn a damaged head, and return the newest checkpoint that is undamaged."""
    condemn_if_damaged(log, damaged)
    if spec.checkpoint.on_bad_checkpoint == "stop":
        raise _describe_damage(spec, damaged)
    for row in CheckpointCatalog(log).list_checkpoints():
        if not row.is_restorable or not row.id:
            continue
        candidate = CheckpointId.parse(row.id)
        verification = verify_checkpoint(log, candidate, checksums=False)
        if verification.verdict is CheckpointVerdict.HEALTHY:
            return candidate
    raise NO_WHOLE_CHECKPOINT(pipeline=spec.name)


def explain_by_damage(spec: SupervisedSpec, log: SlotLog) -> TidegateError | None:
    """Return why a driver that runs cannot go on, if files of the newest checkpoint are damaged.

    Every file is read. The checkpoints that need a damaged one are condemned, because the next
    driver, which compares sizes only, would start from one of them again.

    The error is transient if the next driver goes back to a whole checkpoint by itself. None if
    every file is as it was written, and if the store does not answer.
    """
    with contextlib.suppress(TidegateError):
        checkpoint = log.head().checkpoint
        if checkpoint is not None:
            found = verify_checkpoint(log, checkpoint)
            if found.verdict is CheckpointVerdict.DAMAGED:
                condemn_with_ancestors(log, found)
                return _describe_damage(spec, found)
    return None


def _describe_damage(spec: SupervisedSpec, damaged: Verification) -> TidegateError:
    first = damaged.evidence or damaged.findings[0]
    stops = spec.checkpoint.on_bad_checkpoint == "stop"
    error: TidegateError = (CHECKPOINT_DAMAGED if stops else CHECKPOINT_LEFT)(
        pipeline=spec.name,
        checkpoint=damaged.checkpoint,
        problem=first.problem,
        key=first.key,
        detail=first.detail,
    )
    return error


@contextlib.contextmanager
def open_work_folder(given: Path | None) -> Iterator[Path]:
    """Yield the scratch folder, without what killed drivers have left there.

    Without `given` it is a temporary one, which is deleted at the end; a given one stays.

    A driver that is killed cannot delete its scratch files, and each time the input of a whole
    epoch stays. A lock tells the folders of live drivers from those of dead ones: the kernel drops
    it with the process, and child processes do not inherit it.
    """
    with contextlib.ExitStack() as resources:
        if given is None:
            name = resources.enter_context(TemporaryDirectory(prefix=WORK_PREFIX))
            folder = Path(name)
            remove_abandoned_folders(folder.parent)
        else:
            folder = given
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # rows are in its files
        resources.callback(os.close, keep_from_ageing(folder))
        lock = lock_folder(folder)
        if lock is not None:  # otherwise another driver uses the same folder
            resources.callback(os.close, lock)
            for left in (*folder.glob("spark-*"), folder / "decoded"):
                shutil.rmtree(left, ignore_errors=True)
        yield folder


def lock_folder(folder: Path) -> int | None:
    """Lock a scratch folder as long as this process lives, unless it closes the descriptor.

    Returns:
        The descriptor that holds the lock; None if it is taken.
    """
    descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def keep_from_ageing(folder: Path) -> int:
    """Keep systemd-tmpfiles away from a folder, whose files may be older than it lets files be.

    It leaves out what is locked, with everything below, as long as this process lives.

    Returns:
        The descriptor that holds the lock, which others may hold as well.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # a network file system may have no locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def remove_abandoned_folders(parent: Path) -> None:
    """Delete the temporary folders of drivers that were killed."""
    for folder in parent.glob(f"{WORK_PREFIX}*"):
        _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Delete the temporary folder of a driver that was killed."""
    lock_file = folder / _LOCK_FILE
    with contextlib.suppress(OSError):  # of another user, or deleted just now
        # A young folder may belong to a driver that has not locked it yet.
        if lock_file.stat().st_mtime > time.time() - _YOUNG_FOLDER:
            return
        lock = lock_folder(folder)
        if lock is not None:
            try:
                shutil.rmtree(folder)
            finally:
                os.close(lock)
