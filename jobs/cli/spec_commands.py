"""`tidegate validate`, `schema`, `infer`, `advise` and `whatif`: help to write a spec.

`advise` shows the lag that each source needs, and what its present lag costs. `whatif` decides the
sealed epochs again with other options.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.checkpoints.row_counts import RowCounts
from tidegate.errors import ConfigurationError
from tidegate.json_types import JsonObject

from . import arguments, output
from .arguments import EnvironmentOption, JsonOption, PipelineArgument, StoreOption
from .errors import CANNOT_WRITE

if TYPE_CHECKING:
    from tidegate.jobs.spec.job_spec import JobSpec
    from tidegate.jobs.spec.pipeline import PipelineSpec


def validate_specs(
    spec: Annotated[
        list[str],
        typer.Argument(metavar="SPEC...", help="Paths of pipeline specs, or pipelines' names."),
    ],
    environment: EnvironmentOption = None,
    as_json: JsonOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say where each output is computed, and why.")
    ] = False,
) -> None:
    """Check specs of pipelines and jobs.

    The error of an invalid one names file, line, field, the value and the allowed values. Exit
    code 2 if one is invalid. With `--env` each valid one is printed as it is in that environment.
    """
    from tidegate.jobs.spec.job_spec import JobSpec
    from tidegate.jobs.spec.loader import list_spec_warnings

    reports: list[JsonObject] = []
    # All of them are checked, so that one run in CI shows every mistake.
    for name in spec:
        try:
            pipeline = _find_checked_spec(name, environment, is_shown=not as_json)
            if isinstance(pipeline, JobSpec):
                reports.append({"spec": name, "valid": True, "name": pipeline.name, "kind": "job"})
                if not as_json:
                    output.print_line(f"{name}: the job {pipeline.name} is valid")
                continue
            warnings = _check_expressions(name, pipeline) + list_spec_warnings(pipeline)
            _check_topics(pipeline)
        except ConfigurationError as error:
            reports.append({"spec": name, "valid": False, "error": error.as_dict()})
            if not as_json:
                output.print_error(error)
        else:
            facts = {
                "pipeline": pipeline.name,
                "digest": pipeline.digest(),
                "sources": list(pipeline.sources),
                "tables": list(pipeline.table_names),
            }
            reports.append({"spec": name, "valid": True, "warnings": warnings, **facts})
            if not as_json:
                engines = _find_engines(pipeline) if verbose else {}
                output.print_text(
                    "valid_spec", name=name, spec=pipeline, warnings=warnings, engines=engines
                )
    if as_json:
        output.print_envelope("validation", reports)
    if not all(report["valid"] for report in reports):
        raise typer.Exit(2)


def _find_checked_spec(
    name: str, environment: str | None, *, is_shown: bool
) -> PipelineSpec | JobSpec:
    from tidegate.jobs.spec.operations import QualitySpec

    pipeline = arguments.find_any_spec(name, environment)
    # Reading the suites imports pandas; the default section cannot be wrong.
    if pipeline.quality != QualitySpec():
        from tidegate.expectations.suite_files import find_suites, load_suites

        load_suites(find_suites(pipeline, arguments.resolve_spec_path(name).parent))
    if environment is not None and is_shown:
        _print_merged_spec(name, environment)
    return pipeline


def _print_merged_spec(name: str, environment: str) -> None:
    """Print a spec with the files of its environment, with ``***`` for secrets."""
    from tidegate.jobs.spec.loader import render_spec
    from tidegate.jobs.spec.spec_masks import mask_spec_lines

    text = render_spec(arguments.resolve_spec_path(name), environment)
    for line in mask_spec_lines(text):
        output.print_line(line)


def print_json_schema(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it to a file instead.")
    ] = None,
) -> None:
    """Print the JSON Schema of pipeline specs, for editors: all fields, choices and defaults."""
    from tidegate.jobs.spec.pipeline import PipelineSpec

    schema = PipelineSpec.model_json_schema(by_alias=True)
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    text = json.dumps(dialect | schema, indent=2)
    if out is None:
        typer.echo(text)
        return
    try:
        out.write_text(text + "\n")
    except OSError as error:
        raise CANNOT_WRITE(file=out, reason=error) from error


def propose_source_schema(
    address: Annotated[str, typer.Argument(metavar="OBJECT", help="s3://bucket/key, or a file.")],
    form: Annotated[
        str | None,
        typer.Option("--format", help="parquet, json, csv, avro or orc; default: by its name."),
    ] = None,
) -> None:
    """Print the schema of a source, as proposed from at most 10,000 rows of one of its objects.

    Review the proposal before you put it into the spec.
    """
    from .starter_spec import describe_misfits, read_sample

    sample = read_sample(address, form)
    columns = {name: one.kind or "string" for name, one in sample.columns.items()}
    # JSON strings are valid YAML, also for column names with colons or quotes.
    fields = ", ".join(f"{json.dumps(name)}: {json.dumps(kind)}" for name, kind in columns.items())
    typer.echo("\n".join([f"schema: {{{fields}}}", *map("# {}".format, describe_misfits(sample))]))


def _check_expressions(name: str, pipeline: PipelineSpec) -> list[str]:
    """Return a sentence per expression that only Spark can judge.

    Raises:
        ConfigurationError: another expression is wrong, or a function cannot be imported.
    """
    from tidegate.jobs.driver.spec_checks import find_mistakes
    from tidegate.jobs.spec.loader import locate_mistakes

    mistakes, unjudged = find_mistakes(pipeline)
    if mistakes:
        raise locate_mistakes(arguments.resolve_spec_path(name), mistakes)
    places = [".".join(map(str, field.place)) for field in unjudged]
    return [f"{place}: Spark checks this expression when a run starts" for place in places]


def _check_topics(pipeline: PipelineSpec) -> None:
    # The import brings Arrow, which few specs need here.
    if any(source.kafka is not None for source in pipeline.sources.values()):
        from tidegate.jobs.sources.topic_checks import require_readable_topics

        require_readable_topics(pipeline, environment=None)


def _find_engines(pipeline: PipelineSpec) -> dict[str, str]:
    """Return what computes each output, with the reason for Spark SQL."""
    from tidegate.jobs.rules.aggregates import list_spark_arguments
    from tidegate.jobs.rules.native_support import explain_unproven_expressions

    tasks = "DuckDB, in Spark's Python tasks"
    moved = "released and late rows" if pipeline.outputs.events else "late rows"
    found = {moved: tasks}
    for name, window in pipeline.windows.items():
        own = "; Spark SQL computes its sql(...) of the rows that they keep"
        found[f"window {name}"] = tasks + (own if window.keeps_rows else "")
    between = "Spark SQL, between Python tasks: "
    arguments = ", ".join(list_spark_arguments(pipeline).values()).replace("\n", "")
    evaluated = {
        "where, select and rules": explain_unproven_expressions(pipeline),
        "arguments of aggregates": arguments or None,
    }
    return {part: between + why for part, why in evaluated.items() if why is not None} | found


def show_lag_advice(
    pipeline: PipelineArgument,
    store: StoreOption = None,
    epochs: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Only the newest N epochs. Default: all kept ones."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw late rows over lag into a .png or .svg file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the lag each source needs for 1 %, 0.1 % and 0.01 % late rows.

    Also shows what the present lag costs. Reads the lateness sketches of the sealed epochs: how far
    each row was behind the newest row before it. The lag is a delay: no row is released and no
    window closes before its source has shown a row that much newer.
    """
    from tidegate.jobs.advise import lag_advice
    from tidegate.jobs.engine.recorded_epochs import read_kept_manifests

    log = arguments.open_log(pipeline, store)
    # Slots count epochs and merges.
    first = 1 if epochs is None else log.head().slot - epochs + 1
    manifests = list(read_kept_manifests(log, first))
    per_source = manifests[-1].counters.per_source if manifests else {}
    counts = {source: RowCounts.of_source(own) for source, own in per_source.items()}
    counters = {s: {"read": own["read"], "late": own.late_rows} for s, own in counts.items()}
    sketches = [manifest.epoch_notes.sketches for manifest in manifests]
    advice = lag_advice.advise_lags(sketches, read_present_lags(pipeline), counters)
    if plot is not None:
        title = f"{log.pipeline}: late rows over lag, {len(manifests):,} epochs"
        lag_advice.draw_curves(advice, plot, title)
    report = {
        "pipeline": log.pipeline,
        "epochs": len(manifests),
        "first_slot": manifests[0].slot if manifests else None,
        "last_slot": manifests[-1].slot if manifests else None,
        "sources": {source.source: source.as_dict() for source in advice},
        "plot": None if plot is None else str(plot),
    }
    output.print_result(as_json, "advice", report, advice=advice, shares=lag_advice.TARGET_SHARES)


def read_present_lags(pipeline: str) -> dict[str, int | None]:
    """Return the lag (ticks) of every source as the spec sets it; empty without a spec here."""
    try:
        # The advice needs the log only, so it works without a spec.
        path = arguments.resolve_spec_path(pipeline)
    except ConfigurationError:
        return {}
    return {name: source.lag for name, source in arguments.find_spec(str(path)).sources.items()}


def show_what_if(
    pipeline: PipelineArgument,
    lag: Annotated[
        list[str] | None, typer.Option(metavar="SOURCE=DURATION", help="Lag of a source.")
    ] = None,
    idle: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[SOURCE=]DURATION",
            help="Idle timeout of the output, or of a source's members.",
        ),
    ] = None,
    since: Annotated[
        int | None,
        typer.Option(metavar="SLOT", min=1, help="First epoch. Default: the oldest that is kept."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what other lags and idle timeouts would have decided about the sealed epochs.

    Decides every kept epoch again from its recorded survey: frontiers, idleness, barriers and
    delay, beside what happened. Late rows have a lower and an upper bound. Exit code 1 if the
    recorded options do not give the recorded decisions.
    """
    from tidegate.jobs.engine.recorded_epochs import read_recorded_epochs
    from tidegate.jobs.engine.what_if import WhatIfOptions, run_what_if

    spec, log = arguments.open_spec_and_log(pipeline, store)
    options = WhatIfOptions.parse(spec, lag or (), idle or ())
    report = run_what_if(spec.name, read_recorded_epochs(log, spec, since or 1), options, since)
    data = {"pipeline": spec.name, **report.to_record()}
    output.print_result(as_json, "whatif", data, report=report)
    raise typer.Exit(0 if report.is_exact else 1)
