"""Which spec a driver runs: the deployed copy, or the file before there is one."""

import atexit
import shutil
import tempfile
import threading
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from tidegate.checkpoints.checkpoint_specs import plan_against_log
from tidegate.checkpoints.deployed_specs import (
    Deploy,
    DeployedDocument,
    SpecCopy,
    compare_with_copy,
    fill_secrets,
    make_copy,
    may_have_run,
    read_copy,
    read_deployed,
    start_deploy,
)
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.git_commit import find_commit, find_pinned_commit, is_ancestor
from tidegate.jobs.spec.job_spec import JobSpec, SupervisedSpec
from tidegate.jobs.spec.loader import load_any_spec, read_spec_name
from tidegate.jobs.spec.spec_plan import PlanExit
from tidegate.jobs.spec.user_code import (
    allow_imports,
    collect_code,
    find_code_folder,
    link_other_files,
    write_code,
)

from .deploy_turn import DeployTurn
from .startup import WORK_PREFIX, keep_from_ageing, lock_folder, remove_abandoned_folders

_log = structlog.get_logger("tidegate.driver")


@dataclass(frozen=True)
class LaunchSpec:
    """What a driver runs.

    Attributes:
        spec: the pipeline or job.
        folder: where its code lies.
        checkout: where the code of the file lies.
        turn: the driver's part in a deploy.
    """

    spec: SupervisedSpec
    folder: Path
    checkout: Path
    turn: DeployTurn

    @property
    def script(self) -> Path:
        """The script of a job."""
        assert isinstance(self.spec, JobSpec)  # noqa: S101 - pipelines have none
        return self.folder / Path(self.spec.app).name

    @property
    def script_place(self) -> Path:
        """Where the script of a job takes itself to lie: what it writes there stays."""
        return self.checkout / self.script.name if self.checkout.is_dir() else self.script


def load_launch_spec(path: Path, store_url: str) -> LaunchSpec:
    """Return what a driver runs that a supervisor has started with this file.

    Modules of its code can be imported from then on, here and in Spark's tasks.

    Raises:
        ConfigurationError: nothing is deployed, and the file is wrong.
        TransientError: the store did not answer for ten minutes.
        PoisonError: the deployed copy cannot be read.
    """
    # Imported here, because `pipeline_run` needs this room's other modules first.
    from .pipeline_run import make_startup_retry

    retry = make_startup_retry(read_spec_name(path), threading.Event())
    with closing(retry(open_store, store_url)) as store:
        found: LaunchSpec = retry(choose_launch_spec, path, store)
    if found.turn.copy.code and not isinstance(found.spec, JobSpec):
        allow_imports(found.folder)
    return found


def choose_launch_spec(path: Path, store: Store) -> LaunchSpec:
    """As `load_launch_spec`, with an open store and without a retry."""
    file, mistake = None, None
    code: dict[str, str] = {}
    try:
        file = load_any_spec(path)
        code = collect_code(file, path)
    except ConfigurationError as error:
        mistake = error
    name = read_spec_name(path) if file is None else file.name
    deployed = read_deployed(store, name)
    if file is not None:
        deployed = _deploy_automatically(store, file, path, code, deployed)
    if deployed.wanted is None:
        if file is None:
            raise mistake or ConfigurationError(f"no spec in {path}", code="spec.unreadable")
        first = make_file_launch(file, path, who="driver", why="first launch")
        return replace(first, folder=_extract_code(first.turn.copy, first.folder, is_equal=True))
    copy = read_copy(store, name, deployed.wanted.digest)
    if mistake is not None:
        _log.warning("file_not_read", pipeline=name, error=mistake.message)
    elif file is not None and (found := compare_with_copy(copy, file, code)):
        _log.warning("file_differs", pipeline=name, changes=[str(one) for one in found])
    spec = fill_secrets(copy, file)
    checkout = find_code_folder(spec, path)
    folder = _extract_code(copy, checkout, is_equal=code == copy.code)
    return LaunchSpec(spec, folder, checkout, DeployTurn(name, copy, deployed.wanted))


def make_file_launch(
    spec: SupervisedSpec, path: Path, *, who: str, why: str, replaces: bool = False
) -> LaunchSpec:
    """Return a launch of a file, which is deployed by its first round."""
    copy = make_copy(spec, collect_code(spec, path))
    now, commit = SYSTEM_CLOCK.wall_ticks(), find_commit(path)
    deploy = Deploy(digest=copy.digest, who=who, why=why, at=now, commit=commit)
    turn = DeployTurn(spec.name, copy, deploy, replaces)
    folder = find_code_folder(spec, path)
    return LaunchSpec(spec, folder, folder, turn)


def _deploy_automatically(
    store: Store,
    file: SupervisedSpec,
    path: Path,
    code: dict[str, str],
    deployed: DeployedDocument,
) -> DeployedDocument:
    """Deploy a file that says so, if it differs from the copy and its plan refuses nothing."""
    wanted, copy = deployed.wanted, make_copy(file, code)
    failed = deployed.failed.deploy.digest if deployed.failed else None
    if (
        file.supervision.deploy != "auto"
        or wanted is None
        or copy.digest in (failed, wanted.digest)
    ):
        return deployed
    if not compare_with_copy(read_copy(store, file.name, wanted.digest), file, code):
        return deployed
    if _is_older_commit(store, file, path, code, deployed):
        _log.warning("not_deployed", pipeline=file.name, changes=["the file is of an older commit"])
        return deployed
    if not isinstance(file, JobSpec):
        plan = plan_against_log(SlotLog(store, file.name), file)
        if plan.exit_code is PlanExit.REFUSED:
            _log.warning("not_deployed", pipeline=file.name, changes=[r.what for r in plan.rows])
            return deployed
    why, commit = "supervision.deploy: auto", find_commit(path)
    return start_deploy(store, file.name, copy, who="the spec", why=why, commit=commit)


def _is_older_commit(
    store: Store,
    file: SupervisedSpec,
    path: Path,
    code: dict[str, str],
    deployed: DeployedDocument,
) -> bool:
    """Whether a file of a git bundle may be older than what is deployed.

    A long run keeps its commit. A newer one that was deployed since must not be undone.
    """
    pinned = find_pinned_commit(path)
    if pinned is None or deployed.wanted is None:
        return False
    earlier = (deployed.wanted, deployed.current, *deployed.past)
    if any(one is not None and one.commit == pinned[:12] for one in earlier):
        return True
    newest = (deployed.wanted.commit or "").partition(",")[0]
    if newest and is_ancestor(path, pinned, newest):
        return True
    # Someone may have gone back to an older commit on purpose.
    is_newer = bool(newest) and is_ancestor(path, newest, pinned)
    return may_have_run(store, file.name, file, code, counts_unreadable=not is_newer)


def _extract_code(copy: SpecCopy, checkout: Path, *, is_equal: bool) -> Path:
    """Return a folder with the code of a copy, which goes with this process.

    The checkout may change or go while the driver lives, and its tasks import modules at any time.

    Args:
        copy: of spec and code.
        checkout: the folder with the code of the file.
        is_equal: both have the same code, so that it finds the other files of the checkout.
    """
    # The script of a job runs in place, where it finds all files of the checkout.
    is_job = isinstance(copy.parse_spec(), JobSpec)
    if not copy.code or (is_job and is_equal):
        return checkout
    folder = Path(tempfile.mkdtemp(prefix=f"{WORK_PREFIX}code-"))
    # Here too: a job, or a driver with a given scratch folder, has no other temporary one.
    remove_abandoned_folders(folder.parent)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    lock_folder(folder)  # if this process is killed, a later driver deletes the folder
    keep_from_ageing(folder)
    write_code(copy.code, folder)
    if is_equal:
        link_other_files(checkout, folder, with_modules=True)
    return folder
