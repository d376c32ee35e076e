"""`tidegate conformance`: the neutral cases and the project's own vectors, run through the real decider."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate.jobs.cli import output
from tidegate.jobs.cli.context import JsonOption

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Run conformance suites.")


@app.callback()
def _group() -> None:
    """Run conformance suites."""


@app.command()
def run(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Case files (JSON); the stem names the suite.")],
    engine: Annotated[str, typer.Option(help="What answers: decider, reference, or spark (the window suites).")] = "decider",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Name skipped cases too, with the reason.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run every case of the files. Exit 1 when one fails."""
    from tidegate.jobs.conformance.runner import run as run_files

    report = run_files(files, engine)
    if as_json:
        output.print_envelope("conformance", report.as_dict())
    else:
        rows = [
            (file.suite, *(file.count(o) for o in ("passed", "failed", "skipped")), f"{file.seconds:.1f}")
            for file in report.files
        ]
        output.print_table(["suite", "passed", "failed", "skipped", "seconds"], rows)
        for line in report.lines(skips=verbose):
            output.console().print(line, markup=False)
    if report.failed:
        raise typer.Exit(1)
