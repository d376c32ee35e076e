"""`tidegate validate` and `tidegate schema`: pipeline specs, for people and for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.jobs.cli import arguments, output
from tidegate.jobs.cli.arguments import JsonOption

if TYPE_CHECKING:
    from tidegate.jobs.spec.pipeline import PipelineSpec


def validate_specs(
    spec: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC...", help="Paths of pipeline specs, or names of known pipelines."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Check pipeline specs.

    A wrong one names file, line, field, what was found and what is allowed; exit 2.
    """
    from tidegate.errors import ConfigurationError
    from tidegate.jobs.spec.loader import list_spec_warnings

    reports: list[dict[str, Any]] = []
    for given in spec:
        try:
            pipeline = arguments.find_spec(given)
            _check_quality_suites(pipeline)
            reports.append(
                {
                    "spec": given,
                    "valid": True,
                    "warnings": list_spec_warnings(pipeline),
                    **_summarize_spec(pipeline),
                }
            )
        except ConfigurationError as error:
            reports.append({"spec": given, "valid": False, "error": error.as_dict()})
            if not as_json:
                output.print_error(error)
            continue
        if not as_json:
            output.console().print(f"{given}: valid; {_describe_spec(pipeline)}")
            for warning in list_spec_warnings(pipeline):
                output.console().print(f"{given}: warning: {warning}", markup=False)
    if as_json:
        output.print_envelope("validation", reports)
    if not all(report["valid"] for report in reports):
        raise typer.Exit(2)


def print_json_schema(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it to a file instead.")
    ] = None,
) -> None:
    """Print the JSON Schema of pipeline specs, for editors.

    Every field with its choices and defaults.
    """
    from tidegate.errors import ConfigurationError
    from tidegate.jobs.spec.pipeline import PipelineSpec

    found = PipelineSpec.model_json_schema(by_alias=True)
    text = json.dumps(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}, indent=2
    )
    if out is None:
        typer.echo(text)
        return
    try:
        out.write_text(text + "\n")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {out}: {error}", code="cli.out", advice="choose another file"
        ) from error


def propose_source_schema(
    address: Annotated[str, typer.Argument(metavar="OBJECT", help="s3://bucket/key, or a file.")],
    form: Annotated[
        str | None,
        typer.Option("--format", help="parquet, json, csv, avro or orc; default: by its name."),
    ] = None,
) -> None:
    """Propose the schema of a source from one of its objects, to be looked over and put into the spec."""
    from tidegate.checkpoints.open_store import open_store
    from tidegate.errors import ConfigurationError
    from tidegate.jobs.sources.schema_inference import infer_columns

    folder, _, name = address.rpartition("/")
    forms = ("parquet", "json", "csv", "avro", "orc")
    form = form or next((one for one in forms if f".{one}" in name), None)
    if form not in forms:
        raise ConfigurationError(
            f"{address}: which format?", code="cli.format", advice=f"--format {', '.join(forms)}"
        )
    data = open_store(folder or ".").get(name).data
    try:
        found = infer_columns(name, data, form)
    except (ValueError, OSError, EOFError) as error:
        raise ConfigurationError(
            f"{address} cannot be read as {form}: {error}", code="cli.format"
        ) from error
    typer.echo(
        "schema:"
        f" {{{', '.join(f'{json.dumps(column)}: {json.dumps(kind)}' for column, kind in found.items())}}}"
    )


def _check_quality_suites(pipeline: PipelineSpec) -> None:
    from tidegate.jobs.spec.operations import QualitySpec

    if (
        pipeline.quality != QualitySpec()
    ):  # reading the suites imports pandas; without a word about quality nothing can be wrong
        from tidegate.expectations.suite_files import load_suites

        load_suites(pipeline)


def _summarize_spec(pipeline: PipelineSpec) -> dict[str, Any]:
    return {
        "pipeline": pipeline.name,
        "digest": pipeline.digest(),
        "sources": list(pipeline.sources),
        "tables": list(pipeline.table_names),
    }


def _describe_spec(pipeline: PipelineSpec) -> str:
    windows = f", windows {', '.join(pipeline.windows)}" if pipeline.windows else ""
    return f"pipeline {pipeline.name}, sources {', '.join(pipeline.sources)}{windows}"
