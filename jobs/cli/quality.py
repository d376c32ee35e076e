"""`tidegate quality`: the checks, in a process of their own, because Great Expectations takes seconds and 300 MB to load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.jobs.cli import context, output
from tidegate.jobs.cli.context import JsonOption, SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.checkpoints.log import SlotLog

__all__ = ["run_quality_checks"]


def run_quality_checks(
    spec: SpecArgument,
    store: StoreOption = None,
    docs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Copy the Data Docs of this run there, to open them in a browser.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check late rows, barriers, checkpoints, dead letters and order of a pipeline. Exit 1 when a critical check fails.

    The result and the Data Docs lie in the store, under <pipeline>/quality/.
    """
    pipeline = context.find_spec(spec)
    log = context.open_log(pipeline.name, store)
    command = [sys.executable, "-m", "tidegate.expectations", "run", str(context.resolve_spec_path(spec)), "--store", log.store.url]
    done = subprocess.run([*command, *(["--json"] if as_json else [])], check=False)
    if docs is not None and done.returncode in (0, 1):
        _copy_data_docs(log, docs, quiet=as_json)
    raise typer.Exit(done.returncode)


def _copy_data_docs(log: SlotLog, folder: Path, *, quiet: bool) -> None:
    from tidegate.checkpoints.canonical import parse_json
    from tidegate.checkpoints.layout import BucketLayout

    latest = parse_json(log.store.get(f"{BucketLayout(log.pipeline).quality_prefix}results/latest.json").data)
    folder.mkdir(parents=True, exist_ok=True)
    for page in log.store.list_objects(latest["docs"].removesuffix("index.html")):
        (folder / page.key.rsplit("/", 1)[1]).write_bytes(log.store.get(page.key).data)
    if not quiet:
        output.console().print(f"Data Docs copied: {folder / 'index.html'}")
