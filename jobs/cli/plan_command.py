"""`tidegate plan`: what a changed spec would do, before anyone starts it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.json_types import JsonObject

from . import arguments, output
from .arguments import EnvironmentOption, JsonOption, SpecArgument, StoreOption
from .errors import PLAN_OF_JOB, PLAN_OF_OTHER

if TYPE_CHECKING:
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
) -> None:
    """Show what a spec would do to the state of its pipeline. Changes nothing.

    The rules are those of the driver when it starts. Exit codes: 0 nothing changes, 10 something
    does, 11 the driver would refuse, 12 it depends on state that `--against` cannot know.
    """
    given = arguments.find_any_spec(spec, environment)
    if against is None:
        plan = _plan_with_store(given, store)
    else:
        plan = _plan_with_file(given, arguments.find_any_spec(against, environment), against)
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


def _plan_with_store(given: PipelineSpec | JobSpec, store: str | None) -> SpecPlan:
    from tidegate.checkpoints.checkpoint_specs import plan_against_log
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.jobs.spec.job_spec import JobSpec

    if isinstance(given, JobSpec):
        raise PLAN_OF_JOB(name=given.name)
    return plan_against_log(SlotLog(arguments.open_existing_store(store), given.name), given)
