"""`tidegate plan` shows what a changed spec would do, and `tidegate deploy` has drivers run it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.json_types import JsonObject

from . import arguments, output
from .arguments import (
    EnvironmentOption,
    JsonOption,
    SpecArgument,
    StoreOption,
    WaitOption,
    WhyOption,
)
from .errors import (
    CANNOT_WRITE,
    PLAN_OF_OTHER,
    PLAN_OUTDATED,
)

if TYPE_CHECKING:
    from tidegate.checkpoints.deployed_specs import SpecCopy
    from tidegate.jobs.spec.job_spec import JobSpec
    from tidegate.jobs.spec.pipeline import PipelineSpec
    from tidegate.jobs.spec.spec_plan import SpecPlan


def show_plan(
    spec: SpecArgument,
    store: StoreOption = None,
    environment: EnvironmentOption = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Compare with this spec instead of a store's state."),
    ] = None,
    as_json: JsonOption = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan for `deploy --plan`.")
    ] = None,
) -> None:
    """Show what a spec would do to the state of its pipeline. Changes nothing.

    The rules are those of the driver when it starts. Exit codes: 0 nothing changes, 10 something
    does, 11 the driver would refuse, 12 it depends on state that `--against` cannot know.
    """
    given = arguments.find_any_spec(spec, environment)
    if against is None:
        from tidegate.checkpoints.deploy_requests import plan_with_store

        plan = plan_with_store(arguments.open_existing_store(store), given)
    else:
        plan = _plan_with_file(given, arguments.find_any_spec(against, environment), against)
    if out is not None:
        digest = _make_copy(given, spec).digest
        text = json.dumps({"plan": _describe_verdicts(plan), "digest": digest}, indent=2)
        try:
            out.write_text(text + "\n", "utf-8")
        except OSError as error:
            raise CANNOT_WRITE(file=out, reason=error.strerror) from error
    if as_json:
        output.print_envelope("plan", describe_plan(plan))
    else:
        output.print_text("plan_markdown" if markdown else "plan", plan=plan)
    raise typer.Exit(plan.exit_code)


def describe_plan(plan: SpecPlan) -> JsonObject:
    """Return the data of the envelope."""
    return {**asdict(plan), "exit_code": int(plan.exit_code)}


def _plan_with_file(
    given: PipelineSpec | JobSpec, old: PipelineSpec | JobSpec, against: str
) -> SpecPlan:
    from tidegate.jobs.spec.job_spec import JobSpec
    from tidegate.jobs.spec.spec_plan import plan_against_spec, plan_job_against_spec

    if isinstance(old, JobSpec) and isinstance(given, JobSpec) and old.name == given.name:
        return plan_job_against_spec(old, given, against)
    if isinstance(old, JobSpec) or isinstance(given, JobSpec) or old.name != given.name:
        raise PLAN_OF_OTHER(name=given.name, other=old.name, file=against)
    return plan_against_spec(old, given, against)


def deploy_spec(
    spec: SpecArgument,
    store: StoreOption = None,
    why: WhyOption = "",
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only if this plan still holds.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    wait: WaitOption = 60.0,
    environment: EnvironmentOption = None,
) -> None:
    """Have the drivers of a pipeline or job run a changed spec.

    Shows what differs and the plan first. A running driver ends after its epoch, and its supervisor
    starts the next one with the new spec. If that fails before its first round, drivers run the
    spec before. Exit codes: 11 the plan refuses; 2 it failed; 3 no driver has begun with it in
    time, and the next one does.
    """
    from tidegate.checkpoints.deploy_requests import (
        await_deploy,
        propose_deploy,
        request_deploy,
    )
    from tidegate.jobs.spec.git_commit import find_commit

    given = arguments.find_any_spec(spec, environment)
    place = arguments.open_existing_store(store)
    proposal = propose_deploy(place, given, _make_copy(given, spec).code)
    if proposal is None:
        output.print_line(f"{given.name}: nothing is deployed yet; the first driver runs the file")
        return
    if proposal.plan is None:
        output.print_line(f"{given.name}: nothing differs from the deployed spec")
        return
    copy = proposal.copy
    if plan is not None:
        _require_same_plan(plan, proposal.plan, copy.digest)
    for change in proposal.changes:
        output.print_line(f"  {change}")
    output.print_text("plan", plan=proposal.plan)
    if proposal.is_refused:
        raise typer.Exit(proposal.plan.exit_code)
    if not yes:
        typer.confirm("deploy?", abort=True)
    who, commit = arguments.get_user_name(), find_commit(arguments.resolve_spec_path(spec))
    if not request_deploy(place, given.name, copy, who=who, why=why, commit=commit):
        output.print_line(f"{given.name}: no driver runs; the next one begins with the new spec")
        return
    await_deploy(place, given.name, copy.digest, wait)
    output.print_line(f"{given.name}: deployed")


def _make_copy(given: PipelineSpec | JobSpec, spec: str) -> SpecCopy:
    from tidegate.checkpoints.deployed_specs import make_copy
    from tidegate.jobs.spec.user_code import collect_code

    return make_copy(given, collect_code(given, arguments.resolve_spec_path(spec)))


def _describe_verdicts(plan: SpecPlan) -> JsonObject:
    """What a plan says, without the checkpoint: a running driver seals one after the other."""
    timeline = None if plan.against is None else plan.against.partition("-")[0]
    rows = [[row.what, row.verdict.value, row.why] for row in plan.rows]
    return {"pipeline": plan.pipeline, "timeline": timeline, "rows": rows}


def _require_same_plan(file: Path, plan: SpecPlan, digest: str) -> None:
    """Refuse a plan of another spec, or one whose verdicts are others by now.

    Raises:
        ConfigurationError: it is not the same, or cannot be read.
    """
    try:
        written = json.loads(file.read_text("utf-8"))
        then, of = written["plan"], written["digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PLAN_OUTDATED(file=file, name=plan.pipeline, what="it cannot be read") from error
    if of != digest:
        raise PLAN_OUTDATED(file=file, name=plan.pipeline, what="the spec or its code has changed")
    if then != _describe_verdicts(plan):
        what = "the state has changed, and the verdicts with it"
        raise PLAN_OUTDATED(file=file, name=plan.pipeline, what=what)
