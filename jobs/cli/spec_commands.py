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
from .arguments import JsonOption, PipelineArgument, StoreOption
from .errors import CANNOT_WRITE

if TYPE_CHECKING:
    from tidegate.jobs.advise.lag_advice import LagAdvice
    from tidegate.jobs.engine.what_if import WhatIfReport
    from tidegate.jobs.spec.job_spec import JobSpec
    from tidegate.jobs.spec.pipeline import PipelineSpec

_TICKS_PER_SECOND, _TEN_MINUTES = 1_000_000, 600_000_000


def validate_specs(
    spec: Annotated[
        list[str],
        typer.Argument(metavar="SPEC...", help="Paths of pipeline specs, or pipelines' names."),
    ],
    as_json: JsonOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say where each output is computed, and why.")
    ] = False,
) -> None:
    """Check specs of pipelines and jobs.

    The error of an invalid one names file, line, field, the value and the allowed values. Exit
    code 2 if one is invalid.
    """
    from tidegate.jobs.spec.job_spec import JobSpec
    from tidegate.jobs.spec.loader import list_spec_warnings

    reports: list[JsonObject] = []
    # All of them are checked, so that one run in CI shows every mistake.
    for name in spec:
        try:
            pipeline = arguments.find_any_spec(name)
            _check_quality_suites(name, pipeline)
            if isinstance(pipeline, JobSpec):
                reports.append({"spec": name, "valid": True, "name": pipeline.name, "kind": "job"})
                if not as_json:
                    output.print_line(f"{name}: the job {pipeline.name} is valid")
                continue
            warnings = _check_expressions(name, pipeline) + list_spec_warnings(pipeline)
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
                _print_valid_spec(name, pipeline, warnings, verbose=verbose)
    if as_json:
        output.print_envelope("validation", reports)
    if not all(report["valid"] for report in reports):
        raise typer.Exit(2)


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
    from .starter_spec import read_sample

    sample = read_sample(address, form)
    columns = {name: one.kind or "string" for name, one in sample.columns.items()}
    # JSON strings are valid YAML, also for column names with colons or quotes.
    fields = ", ".join(f"{json.dumps(name)}: {json.dumps(kind)}" for name, kind in columns.items())
    typer.echo(f"schema: {{{fields}}}")


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


def _check_quality_suites(name: str, pipeline: PipelineSpec | JobSpec) -> None:
    from tidegate.jobs.spec.operations import QualitySpec

    # Reading the suites imports pandas; the default section cannot be wrong.
    if pipeline.quality != QualitySpec():
        from tidegate.expectations.suite_files import find_suites, load_suites

        load_suites(find_suites(pipeline, arguments.resolve_spec_path(name).parent))


def _print_valid_spec(
    name: str, pipeline: PipelineSpec, warnings: list[str], *, verbose: bool
) -> None:
    windows = f", windows {', '.join(pipeline.windows)}" if pipeline.windows else ""
    sources = ", ".join(pipeline.sources)
    output.print_line(f"{name}: valid; pipeline {pipeline.name}, sources {sources}{windows}")
    for warning in warnings:
        output.print_line(f"{name}: warning: {warning}")
    if verbose:
        _print_engines(pipeline)


def _print_engines(pipeline: PipelineSpec) -> None:
    from tidegate.jobs.rules.native_support import explain_spark_rows, explain_spark_window

    rows = explain_spark_rows(pipeline)
    own = {name: s for name, s in pipeline.sources.items() if s.select or s.has_conditions}
    reasons = {f"where, select and rules of {n}": rows for n in own}
    reasons |= {"released and late rows": rows}
    reasons |= {f"window {w}": rows or explain_spark_window(pipeline, w) for w in pipeline.windows}
    for name, reason in reasons.items():
        engine = "DuckDB, in the driver" if reason is None else f"Spark SQL: {reason}"
        output.print_line(f"  {name}: {engine}")


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
    if as_json:
        report = {
            "pipeline": log.pipeline,
            "epochs": len(manifests),
            "first_slot": manifests[0].slot if manifests else None,
            "last_slot": manifests[-1].slot if manifests else None,
            "sources": {source.source: source.as_dict() for source in advice},
            "plot": None if plot is None else str(plot),
        }
        output.print_envelope("advice", report)
    else:
        _print_advice(log.pipeline, len(manifests), advice)
        if plot is not None:
            output.print_line(f"drawn: {plot}")


def read_present_lags(pipeline: str) -> dict[str, int | None]:
    """Return the lag (ticks) of every source as the spec sets it; empty without a spec here."""
    try:
        # The advice needs the log only, so it works without a spec.
        path = arguments.resolve_spec_path(pipeline)
    except ConfigurationError:
        return {}
    return {name: source.lag for name, source in arguments.find_spec(str(path)).sources.items()}


def _print_advice(pipeline: str, epochs: int, advice: list[LagAdvice]) -> None:
    from tidegate.jobs.advise.lag_advice import TARGET_SHARES

    rows = sum(source.curve.rows for source in advice)
    if not rows:
        output.print_line(
            f"{pipeline}: no lateness sketch in {epochs:,} epochs; advice needs an epoch with rows"
        )
        return
    lags = [f"lag for {_format_share(float(share))} late" for share in TARGET_SHARES]
    columns = ["source", *lags, "lag now", "late at it, at most", "late so far", "rows"]
    title = f"{pipeline}: {rows:,} rows of {epochs:,} epochs"
    output.print_table(columns, [_format_advice_row(source) for source in advice], title=title)
    for source in advice:
        output.print_line(_describe_lag_cost(source))
    read = sum(source.read for source in advice)
    if read > rows:
        output.print_line(f"{rows:,} of {read:,} rows read are in these sketches")


def _format_advice_row(advice: LagAdvice) -> list[object]:
    lags = [_format_lag(target.lag) for target in advice.targets] or [""] * 3
    share = advice.present_share
    # Measured over all epochs, also those that ran with another lag.
    so_far = _format_share(advice.late / advice.read) if advice.read else ""
    now = "unknown" if advice.present is None else _format_lag(advice.present)
    at_most = "" if share is None else _format_share(share)
    return [advice.source, *lags, now, at_most, so_far, advice.curve.rows]


def _describe_lag_cost(advice: LagAdvice) -> str:
    """Describe what the present lag costs, and how much more or less other lags would."""
    if advice.present is None:
        return f"{advice.source}: its lag is not known here; give the path of the spec"
    costs = [
        f"{_format_lag(abs(t.more_delay or 0))} {'more' if (t.more_delay or 0) > 0 else 'less'} for"
        f" {_format_share(float(t.share))} late"
        for t in advice.targets
    ]
    return (
        f"{advice.source}: results wait {_format_lag(advice.present)} for late rows;"
        f" {', '.join(costs)}"
    )


def _format_share(share: float) -> str:
    return f"{share * 100:.4g} %" if share >= 0.0001 or share == 0 else f"{share * 100:.1g} %"


def _format_lag(ticks: int | None) -> str:
    """Format a duration, rounded up to milliseconds from 1 s on, to seconds from 10 min on.

    Rounded up, because a lag that is a little too short misses its target. Empty for None.
    """
    from tidegate.time_units import format_duration

    if ticks is None:
        return ""
    unit = 1_000 if ticks >= _TICKS_PER_SECOND else 1
    if ticks >= _TEN_MINUTES:
        unit = _TICKS_PER_SECOND
    return format_duration(-(-ticks // unit) * unit)


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
    if as_json:
        output.print_envelope("whatif", {"pipeline": spec.name, **report.to_record()})
    else:
        _print_what_if(spec.name, report)
    raise typer.Exit(0 if report.is_exact else 1)


def _print_what_if(pipeline: str, report: WhatIfReport) -> None:
    found = report.to_record()
    courses = happened, other = found["happened"], found["other"]
    title = f"{pipeline}: {report.epochs:,} epochs, {report.first} to {report.last}"
    ends = (output.format_short_instant(frontier) for frontier in report.points[-1][2:])
    rows = [
        ["frontier at the end", *ends],
        ["delay, half of the epochs", *(_format_lag(one["delay_p50_us"]) for one in courses)],
        ["delay, 99 %", *(_format_lag(one["delay_p99_us"]) for one in courses)],
    ]
    rows += [
        [f"{source} idle", *(_describe_idleness(one, source) for one in courses)]
        for source in sorted({*happened["idle"], *other["idle"]})
    ]
    rows += [
        [f"barriers {outcome}", *(str(one["barriers"].get(outcome, 0)) for one in courses)]
        for outcome in sorted({*happened["barriers"], *other["barriers"]})
    ]
    if happened["barriers"] or other["barriers"]:
        waits = (_format_lag(one["barrier_wait_p99_us"]) for one in courses)
        rows.append(["barriers waited, 99 %", *waits])
    for source, late in other["late"].items():
        read = report.read[source]
        so_far = _format_share(report.late[source] / read) if read else ""
        bounds = [_format_share(share) for share in late["share"] if share is not None]
        rows.append([f"{source} late", so_far, " to ".join(dict.fromkeys(bounds))])
    output.print_table(["", "as it was", "with these options"], rows, title=title)
    if report.is_exact:
        output.print_line("the recorded options give every recorded decision")
    for slot, fields in list(report.not_reproduced.items())[:5]:
        output.print_line(
            f"epoch {slot} comes out differently with its own options: {', '.join(fields)}; this is"
            " a defect of tidegate, please report it"
        )


def _describe_idleness(course: JsonObject, source: str) -> str:
    times, ticks = course["idle"].get(source, 0), course["idle_us"].get(source, 0)
    return f"{times} times, {_format_lag(ticks)}" if times or ticks else "never"
