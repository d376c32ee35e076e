"""A deploy that a person asks for: what it would change, the request, and how it ends."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.jobs.spec.job_spec import JobSpec, SupervisedSpec
from tidegate.jobs.spec.spec_differences import FieldDifference
from tidegate.jobs.spec.spec_plan import PlanExit, SpecPlan, plan_job_against_spec

from .checkpoint_specs import plan_against_log
from .deployed_specs import (
    SpecCopy,
    compare_with_copy,
    make_copy,
    read_copy,
    read_deployed,
    start_deploy,
)
from .driver_requests import HOLD_PREFIX, RequestKind, submit_request
from .errors import DEPLOY_RETURNED, DEPLOY_WAITS, PLAN_OF_JOB
from .host_clock import SYSTEM_CLOCK, Clock, poll_until
from .lease import read_lease
from .slot_log import SlotLog
from .store import Store

_POLL_SECONDS = 0.3


@dataclass(frozen=True)
class DeployProposal:
    """What a deploy of a file would change.

    Attributes:
        copy: the spec in the file, and its code.
        changes: in what it differs from the copy that the next driver runs.
        plan: what it would do to the state; None if nothing differs.
    """

    copy: SpecCopy
    changes: list[FieldDifference]
    plan: SpecPlan | None

    @property
    def is_refused(self) -> bool:
        """Whether the driver would refuse the spec."""
        return self.plan is not None and self.plan.exit_code is PlanExit.REFUSED

    @property
    def plan_lines(self) -> list[str]:
        """The rows of the plan, a line each."""
        rows = self.plan.rows if self.plan is not None else ()
        return [
            f"{row.what}: {row.verdict.words}: {row.why}{f': {row.way_out}' * bool(row.way_out)}"
            for row in rows
        ]


def plan_with_store(store: Store, spec: SupervisedSpec) -> SpecPlan:
    """Return what a spec would do to the state in a store.

    A job is compared with its deployed copy, because Spark judges the state.

    Raises:
        ConfigurationError: no copy of the job was deployed.
    """
    if not isinstance(spec, JobSpec):
        return plan_against_log(SlotLog(store, spec.name), spec)
    current = read_deployed(store, spec.name).current
    old = read_copy(store, spec.name, current.digest).parse_spec() if current else None
    if not isinstance(old, JobSpec):
        raise PLAN_OF_JOB(name=spec.name)
    return plan_job_against_spec(old, spec, "the deployed spec")


def propose_deploy(
    store: Store, spec: SupervisedSpec, code: Mapping[str, str]
) -> DeployProposal | None:
    """Return what a deploy would change; None before the first one, when drivers run the file."""
    wanted = read_deployed(store, spec.name).wanted
    if wanted is None:
        return None
    copy = make_copy(spec, dict(code))
    changes = compare_with_copy(read_copy(store, spec.name, wanted.digest), spec, copy.code)
    plan = plan_with_store(store, spec) if changes else None
    return DeployProposal(copy, changes, plan)


def request_deploy(
    store: Store, pipeline: str, copy: SpecCopy, *, who: str, why: str, commit: str | None = None
) -> bool:
    """Have the next driver try a copy, and the running one end after its epoch.

    Return False if no driver runs.
    """
    start_deploy(store, pipeline, copy, who=who, why=why, commit=commit)
    lease = read_lease(store, pipeline)
    if lease is None or lease.is_free:
        return False
    # Not a stop: the desired state stays, so that the supervisor starts the next driver.
    request = f"{HOLD_PREFIX}deploy-{secrets.token_hex(8)}"
    said = f"deploy{f': {why}' if why else ''}"
    submit_request(
        store, pipeline, RequestKind.DRAIN, who=who, why=said, token=lease.token, request_id=request
    )
    return True


def await_deploy(
    store: Store, pipeline: str, digest: str, seconds: float, clock: Clock = SYSTEM_CLOCK
) -> None:
    """Wait until a driver has had its first round with a copy.

    Raises:
        ConfigurationError: the driver has failed before.
        TransientError: neither in time.
    """

    def is_over() -> bool:
        """Whether no copy is being tried any more."""
        return read_deployed(store, pipeline).trying is None

    if not poll_until(is_over, seconds, _POLL_SECONDS, clock):
        raise DEPLOY_WAITS(name=pipeline, seconds=seconds)
    failed = read_deployed(store, pipeline).failed
    if failed is not None and failed.deploy.digest == digest:
        raise DEPLOY_RETURNED(name=pipeline, error=failed.message)
