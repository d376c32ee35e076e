"""`tidegate validate`, `schema` and `infer`: commands about pipeline specs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.jobs.cli import arguments, output
from tidegate.jobs.cli.arguments import JsonOption
from tidegate.jobs.cli.errors import CANNOT_WRITE, UNKNOWN_FORMAT, UNREADABLE_OBJECT

if TYPE_CHECKING:
    from tidegate.jobs.spec.pipeline import PipelineSpec

_FORMATS = ("parquet", "json", "csv", "avro", "orc")


def validate_specs(
    spec: Annotated[
        list[str],
        typer.Argument(metavar="SPEC...", help="Paths of pipeline specs, or pipelines' names."),
    ],
    as_json: JsonOption = False,
) -> None:
    """Check pipeline specs.

    The error of an invalid one names file, line, field, the value and the allowed values. Exit
    code 2 if one is invalid.
    """
    from tidegate.errors import ConfigurationError

    reports: list[dict[str, Any]] = []
    for name in spec:
        try:
            pipeline = arguments.find_spec(name)
            _check_quality_suites(pipeline)
        except ConfigurationError as error:
            reports.append({"spec": name, "valid": False, "error": error.as_dict()})
            if not as_json:
                output.print_error(error)
        else:
            reports.append({"spec": name, "valid": True, **_summarize_spec(pipeline)})
            if not as_json:
                _print_valid_spec(name, pipeline)
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
    """Propose the schema of a source from one of its objects.

    Review the proposal before you put it into the spec.
    """
    from tidegate.checkpoints.open_store import open_store
    from tidegate.jobs.sources.schema_inference import infer_columns

    folder, _, name = address.rpartition("/")
    form = form or next((known for known in _FORMATS if f".{known}" in name), None)
    if form not in _FORMATS:
        raise UNKNOWN_FORMAT(address=address, formats=", ".join(_FORMATS))
    data = open_store(folder or ".").get(name).data
    try:
        columns = infer_columns(name, data, form)
    except (ValueError, OSError, EOFError) as error:
        raise UNREADABLE_OBJECT(address=address, format=form, reason=error) from error
    # JSON strings are valid YAML, also for column names with colons or quotes.
    fields = ", ".join(f"{json.dumps(name)}: {json.dumps(kind)}" for name, kind in columns.items())
    typer.echo(f"schema: {{{fields}}}")


def _check_quality_suites(pipeline: PipelineSpec) -> None:
    from tidegate.jobs.spec.operations import QualitySpec

    # Reading the suites imports pandas; the default section cannot be wrong.
    if pipeline.quality != QualitySpec():
        from tidegate.expectations.suite_files import load_suites

        load_suites(pipeline)


def _summarize_spec(pipeline: PipelineSpec) -> dict[str, Any]:
    from tidegate.jobs.spec.loader import list_spec_warnings

    return {
        "warnings": list_spec_warnings(pipeline),
        "pipeline": pipeline.name,
        "digest": pipeline.digest(),
        "sources": list(pipeline.sources),
        "tables": list(pipeline.table_names),
    }


def _print_valid_spec(name: str, pipeline: PipelineSpec) -> None:
    from tidegate.jobs.spec.loader import list_spec_warnings

    windows = f", windows {', '.join(pipeline.windows)}" if pipeline.windows else ""
    sources = ", ".join(pipeline.sources)
    output.print_line(f"{name}: valid; pipeline {pipeline.name}, sources {sources}{windows}")
    for warning in list_spec_warnings(pipeline):
        output.print_line(f"{name}: warning: {warning}")
