"""What the commands share: which store, which pipeline, which spec."""

from __future__ import annotations

import difflib
import getpass
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.checkpoints.store import Store
    from tidegate.jobs.spec.pipeline import PipelineSpec

_DEFAULT_STORE = Path(".tidegate/store")
_STACK_STATE_FILE = Path(".tidegate/stack.json")

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help=(
            "s3://bucket/prefix, a folder, or 'stack' for the local stack's bucket. "
            "Default: $TIDEGATE_STORE, else .tidegate/store here, else the stack's bucket."
        ),
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON envelope instead of words.")
]
PipelineArgument = Annotated[
    str, typer.Argument(metavar="PIPELINE", help="Name of a pipeline, or the path of its spec.")
]
SpecArgument = Annotated[
    str,
    typer.Argument(
        metavar="SPEC", help="Path of a pipeline spec, or the name of a known pipeline."
    ),
]


def resolve_store_url(given: str | None) -> str:
    """The store's address.

    What was given, else the environment, else this folder's store, else the local stack's.
    """
    chosen = given or os.environ.get("TIDEGATE_STORE")
    if chosen == "stack" or (
        chosen is None and not _DEFAULT_STORE.is_dir() and _STACK_STATE_FILE.is_file()
    ):
        from tidegate.infra.local_stack import Stack

        environment = Stack().environment()  # also tells where MinIO listens and with which key
        os.environ.update(environment)
        return environment["TIDEGATE_STORE"]
    return chosen or str(_DEFAULT_STORE)


def open_existing_store(given: str | None) -> Store:
    """Open the store of a reading command.

    Raises:
        ConfigurationError: a local folder that does not exist; looking must not make one.
    """
    from tidegate.checkpoints.open_store import open_store
    from tidegate.errors import ConfigurationError

    url = resolve_store_url(given)
    folder = Path(url.removeprefix("file://"))
    if ("://" not in url or url.startswith("file://")) and not folder.is_dir():
        raise ConfigurationError(
            f"there is no store at {folder.absolute()}",
            code="cli.no_store",
            advice=(
                "name one with --store or TIDEGATE_STORE, or run a pipeline here first: tidegate"
                " run SPEC.yaml"
            ),
        )
    return open_store(url)


def list_pipelines(store: Store) -> list[str]:
    """Pipelines that ran in this store."""
    from tidegate.checkpoints.bucket_layout import BucketLayout
    from tidegate.errors import ConfigurationError

    found = []
    for name in store.list_folders(""):
        try:
            key = BucketLayout(name).identity_key
        except ConfigurationError:
            continue  # a folder of somebody else
        if store.stat(key) is not None:
            found.append(name)
    return found


def open_log(pipeline: str, given: str | None) -> SlotLog:
    """The log of a pipeline that exists.

    Raises:
        ConfigurationError: it never ran in this store; the known ones are named.
    """
    from tidegate.checkpoints.pipeline_identity import read_identity
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.errors import ConfigurationError

    store = open_existing_store(given)
    name = find_spec(pipeline).name if _is_spec_path(pipeline) else pipeline
    log = SlotLog(store, name)
    if read_identity(store, name) is None:
        known = list_pipelines(store)
        close = difflib.get_close_matches(name, known, n=1)
        raise ConfigurationError(
            f"no pipeline {name!r} in {store.url}"
            + (f"; did you mean {close[0]!r}?" if close else ""),
            code="cli.unknown_pipeline",
            advice=(
                f"known: {', '.join(known)}"
                if known
                else "nothing ran here yet: tidegate run SPEC.yaml"
            ),
        )
    return log


def resolve_spec_path(spec: str) -> Path:
    """The file of a spec given by path or by pipeline name.

    Names are looked up in $TIDEGATE_PIPELINES, then `dags/pipelines` here.

    Raises:
        ConfigurationError: no such file.
    """
    from tidegate.errors import ConfigurationError

    if _is_spec_path(spec):
        return Path(spec)
    places = [Path(p) for p in (os.environ.get("TIDEGATE_PIPELINES"), "dags/pipelines") if p]
    specs = {path.stem: path for place in reversed(places) for path in sorted(place.glob("*.y*ml"))}
    if spec in specs:
        return specs[spec]
    raise ConfigurationError(
        f"no spec for {spec!r} in {' or '.join(map(str, places))}",
        code="cli.unknown_spec",
        advice="give the path of its YAML file"
        + (f"; by name there are: {', '.join(sorted(specs))}" if specs else ""),
    )


def find_spec(spec: str) -> PipelineSpec:
    """Load a spec given by path or by pipeline name. Raises ConfigurationError."""
    from tidegate.jobs.spec.loader import load_spec

    return load_spec(resolve_spec_path(spec))


def get_user_name() -> str:
    """Who asks, for the records of restores, pins and stops."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _is_spec_path(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) or "/" in text
