"""`tidegate quality`: the checks, in a process of their own, because Great Expectations takes seconds and 300 MB to load."""

from __future__ import annotations

import subprocess
import sys

import typer

from tidegate.jobs.cli import context
from tidegate.jobs.cli.context import JsonOption, SpecArgument, StoreOption

__all__ = ["quality"]


def quality(spec: SpecArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Check late rows, barriers, checkpoints, dead letters and order of a pipeline. Exit 1 when a critical check fails.

    The last line is the store key of the result; Data Docs lie beside it.
    """
    pipeline = context.find_spec(spec)
    log = context.open_log(pipeline.name, store)
    command = [sys.executable, "-m", "tidegate.expectations", "run", str(context.spec_path(spec)), "--store", log.store.url]
    done = subprocess.run([*command, *(["--json"] if as_json else [])], check=False)
    raise typer.Exit(done.returncode)
