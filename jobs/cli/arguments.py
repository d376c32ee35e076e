"""Arguments and options that commands share, and how they resolve to a store, a spec and a log."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.errors import ConfigurationError, suggest_name

from .errors import BAD_TIME, NO_PIPELINE_YET, NO_STORE, STACK_DOWN, UNKNOWN_PIPELINE, UNKNOWN_SPEC

if TYPE_CHECKING:
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.checkpoints.store import Store
    from tidegate.jobs.spec.job_spec import JobSpec
    from tidegate.jobs.spec.pipeline import PipelineSpec

_Spec = TypeVar("_Spec")

# Relative to the working folder: a checkout is the unit that a person works in.
_DEFAULT_STORE = Path(".tidegate/store")
_STACK_STATE_FILE = Path(".tidegate/stack.json")

PipelineArgument = Annotated[
    str, typer.Argument(metavar="PIPELINE", help="Name of a pipeline, or the path of its spec.")
]
SpecArgument = Annotated[
    str, typer.Argument(metavar="SPEC", help="Path of a pipeline spec, or a pipeline's name.")
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="s3://bucket/prefix, a folder, or 'stack' for the local stack's bucket. "
        "Default: $TIDEGATE_STORE, else .tidegate/store here, else the stack's bucket.",
    ),
]
EnvironmentOption = Annotated[
    str | None,
    typer.Option(
        "--env",
        metavar="NAME",
        help="Merge the files of this environment into the spec: envs/NAME.yaml beside it, and "
        "envs/NAME/ with a file of the spec's name. Default: $TIDEGATE_ENV.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON envelope.")]
WhyOption = Annotated[str, typer.Option(help="Reason; recorded with the change.")]
WhoOption = Annotated[str | None, typer.Option(help="Who decided. Default: you.")]
WaitOption = Annotated[
    float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for the driver's answer.")
]
DryRunOption = Annotated[bool, typer.Option(help="Only print what would change.")]
OutputFilter = Annotated[
    list[str] | None,
    typer.Option("--output", help="Only rows that missed this output: events or a window."),
]
SourceFilter = Annotated[
    list[str] | None, typer.Option("--source", help="Only rows of this source.")
]
SinceOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="Event time from here on, ISO 8601.")
]
UntilOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="Event time before this, ISO 8601.")
]
ReasonFilter = Annotated[
    list[str] | None, typer.Option("--reason", help="Only rows that have this reason.")
]


def resolve_store_url(given: str | None) -> str:
    """Return the store's address.

    The first that there is: `given`, $TIDEGATE_STORE, the store in this folder, the local stack's;
    else the store in this folder, although it does not exist. For the stack's bucket, its address
    and keys are put into this process's environment.

    Raises:
        TransientError: the stack is down.
        ConfigurationError: the stack was never up.
    """
    chosen = given or os.environ.get("TIDEGATE_STORE")
    # A store in this folder wins over the stack: the person works here.
    only_stack = not _DEFAULT_STORE.is_dir() and _STACK_STATE_FILE.is_file()
    if chosen == "stack" or (chosen is None and only_stack):
        from tidegate.infra.local_stack import Stack

        stack = Stack()
        environment = stack.environment()
        if not stack.minio_server().alive:
            raise STACK_DOWN(home=stack.home)
        # The S3 client reads MinIO's address and keys from the environment.
        os.environ.update(environment)
        return environment["TIDEGATE_STORE"]
    return chosen or str(_DEFAULT_STORE)


def open_existing_store(given: str | None) -> Store:
    """Open the store for a command that only reads.

    Raises:
        ConfigurationError: the local folder does not exist; a reading command must not make one.
    """
    from tidegate.checkpoints.open_store import open_store

    url = resolve_store_url(given)
    folder = Path(url.removeprefix("file://"))
    # Opening a local store makes its folder, and an empty store would answer that no pipeline ever
    # ran.
    if ("://" not in url or url.startswith("file://")) and not folder.is_dir():
        raise NO_STORE(folder=folder.absolute())
    return open_store(url)


def list_pipelines(store: Store) -> list[str]:
    """List the pipelines that have run in this store."""
    names = []
    for name in store.list_folders(""):
        try:
            key = BucketLayout(name).identity_key
        except ConfigurationError:
            continue  # not a pipeline's name: other programs may have folders in the bucket
        if store.stat(key) is not None:
            names.append(name)
    return names


def open_log(pipeline: str, given: str | None) -> SlotLog:
    """Open the log of an existing pipeline.

    Raises:
        ConfigurationError: the pipeline never ran in this store; the error lists those that did.
    """
    from tidegate.checkpoints.pipeline_identity import read_identity
    from tidegate.checkpoints.slot_log import SlotLog

    store = open_existing_store(given)
    # A name needs no spec: the log alone answers most questions, also on machines without the
    # specs.
    name = find_any_spec(pipeline).name if _is_spec_path(pipeline) else pipeline
    if read_identity(store, name) is None:
        known = list_pipelines(store)
        if not known:
            raise NO_PIPELINE_YET(name=name, store=store.url)
        suggestion = suggest_name(name, known)
        raise UNKNOWN_PIPELINE(
            name=name, store=store.url, suggestion=suggestion, known=", ".join(known)
        )
    return SlotLog(store, name)


def resolve_slot(log: SlotLog, text: str) -> int:
    """Return the slot of a checkpoint: a number is one, anything else is resolved as everywhere.

    Whether there is a slot with this number is not checked.

    Raises:
        ConfigurationError: no checkpoint fits, or several do.
    """
    from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog

    return int(text) if text.isdigit() else CheckpointCatalog(log).resolve(text).slot


def open_spec_and_log(pipeline: str, store: str | None) -> tuple[PipelineSpec, SlotLog]:
    """Load a pipeline's spec as `find_or_read_spec` does, and open its log.

    Raises:
        ConfigurationError: there is no such spec, or the pipeline never ran in this store.
    """
    spec = find_or_read_spec(pipeline, store)
    return spec, open_log(spec.name, store)


def open_any_spec_and_log(
    pipeline: str, store: str | None
) -> tuple[PipelineSpec | JobSpec, SlotLog]:
    """Do what `open_spec_and_log` does, for jobs as well; a job's YAML file is always needed."""
    spec = _find_or_read_spec(find_any_spec, pipeline, store)
    return spec, open_log(spec.name, store)


def find_or_read_spec(pipeline: str, store: str | None) -> PipelineSpec:
    """Load a pipeline's spec; if no file has the name, the one that sealed the newest epoch.

    Args:
        pipeline: name of the pipeline, or path of its spec.
        store: address of the store; None: as `resolve_store_url` finds it.

    Raises:
        ConfigurationError: there is no such spec, and the pipeline never ran in this store.
    """
    return _find_or_read_spec(find_spec, pipeline, store)


def _find_or_read_spec(
    find: Callable[[str], _Spec], pipeline: str, store: str | None
) -> _Spec | PipelineSpec:
    from tidegate.checkpoints.checkpoint_specs import read_newest_spec

    try:
        return find(pipeline)
    except ConfigurationError as error:
        sealed = None
        if error.code == UNKNOWN_SPEC.code:
            sealed = read_newest_spec(open_log(pipeline, store))
        if sealed is None:
            raise
        return sealed


def resolve_spec_path(spec: str) -> Path:
    """Return the path of a spec.

    `spec` itself if it has a ``/`` or ends in ``.yaml`` or ``.yml``, even if there is no such file.
    Anything else is a pipeline name, looked up in the folder $TIDEGATE_PIPELINES, then in
    `dags/pipelines` below the working directory, then in the working directory itself.

    Raises:
        ConfigurationError: no spec has this name.
    """
    if _is_spec_path(spec):
        return Path(spec)
    folders = [Path(p) for p in (os.environ.get("TIDEGATE_PIPELINES"), "dags/pipelines") if p]
    # Reversed, so that a spec of the first folder replaces one of the same name in the second.
    specs = {
        path.stem: path for folder in reversed(folders) for path in sorted(folder.glob("*.y*ml"))
    }
    here = Path(f"{spec}.yaml")
    if spec in specs or here.is_file():
        return specs.get(spec, here)
    listed = f"; by name there are: {', '.join(sorted(specs))}" if specs else ""
    raise UNKNOWN_SPEC(name=spec, folders=" or ".join(map(str, folders)), specs=listed)


def find_spec(spec: str) -> PipelineSpec:
    """Load the spec of a pipeline, given by path or by name.

    Modules in the folder of the spec can be imported from then on, here and in Spark's tasks.

    Raises:
        ConfigurationError: there is no such spec, it is wrong, or it is that of a job.
    """
    from tidegate.jobs.spec.loader import load_spec

    return load_spec(_allow_imports_beside(resolve_spec_path(spec)))


def find_any_spec(spec: str, environment: str | None = None) -> PipelineSpec | JobSpec:
    """Load the spec of a pipeline or of a job in an environment, as `find_spec`."""
    from tidegate.jobs.spec.loader import load_any_spec

    return load_any_spec(_allow_imports_beside(resolve_spec_path(spec)), environment)


def _allow_imports_beside(path: Path) -> Path:
    from tidegate.jobs.spec.user_code import allow_imports

    allow_imports(path.absolute().parent)
    return path


def get_user_name() -> str:
    """Return the current user, for the records of restores, pins and stops."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id without an entry in /etc/passwd
        return f"uid {os.getuid()}"


def _is_spec_path(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) or "/" in text


def parse_event_time(text: str) -> int:
    """Parse an ISO 8601 time into ticks; without an offset it is UTC.

    Raises:
        ConfigurationError: the text is not a time.
    """
    try:
        instant = datetime.fromisoformat(text)
    except ValueError as error:
        raise BAD_TIME(text=text) from error
    # Never the zone of this machine: the same command must mean the same rows everywhere.
    instant = instant if instant.tzinfo else instant.replace(tzinfo=UTC)
    return round(instant.timestamp() * 1_000_000)
