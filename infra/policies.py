"""Bucket policies that give each role only the rights that it needs.

``python -m tidegate.infra.policies driver BUCKET PIPELINE --input inbox/`` prints one.

* ``driver`` may read and write below the pipeline's own prefix, delete there what retention
  deletes, read the pipeline's inputs, and use the folders of the start-up probe and of backfills.
  Airflow has this role too: its tasks start drivers with their own keys, merge, delete what is due
  and compare ranges with batch runs.
* ``operator`` is for people at a command line. They may read all of the pipeline and its inputs,
  send requests to drivers, decide about late rows, pin and restore. They may not write rows
  (``splice merge``) or delete them (``gc``).
* ``reader`` may read the tables and what is needed to find them; no leases, no requests, no
  writing.
* ``lander`` is for ``tidegate land``. It may write into the inputs' folders and read its own notes
  there, and nothing of the pipeline.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, NamedTuple

import typer

from tidegate.errors import ConfigurationError
from tidegate.json_types import JsonObject

from .errors import LANDER_WITHOUT_INPUT

# The last two show rules that would break the log (`list_bucket_hazards`).
_BUCKET_FACTS = [
    "s3:GetBucketLocation",
    "s3:GetLifecycleConfiguration",
    "s3:GetReplicationConfiguration",
]
_MULTIPART_ACTIONS = ["s3:ListMultipartUploadParts", "s3:AbortMultipartUpload"]
# What a driver deletes: files of retired epochs, caches, and what was answered or has ended. No key
# may delete slots, lease and the other documents, because a shortened log cannot be repaired.
_DELETED_FOLDERS = (
    "timelines/*/state/",
    "timelines/*/tables/",
    "iceberg/",
    "index/",
    "logs/",
    "quality/",
    "staging/",
    "requests/",
    "acks/",
    "splices/",
)


class Role(StrEnum):
    """Who uses the keys."""

    DRIVER = "driver"
    OPERATOR = "operator"
    READER = "reader"
    LANDER = "lander"


def build_policy(
    role: Role, bucket: str, pipeline: str, *, prefix: str = "", inputs: Sequence[str] = ()
) -> JsonObject:
    """Return the policy of a role for one pipeline, as JSON-ready data.

    Args:
        role: the role.
        bucket: name of the bucket.
        pipeline: its name.
        prefix: of the store inside the bucket (``s3://bucket/prefix``).
        inputs: prefixes that the sources read, relative to the store; a lander writes there.
            Without them, no role may read the input.

    Raises:
        ConfigurationError: a lander without a folder to land in.
    """
    root = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    own, folders = f"{root}{pipeline}/", [root + folder.strip("/") + "/" for folder in inputs]
    match role:
        case Role.DRIVER:
            rights = _build_driver_rights(root, pipeline, folders)
        case Role.OPERATOR:
            rights = _build_operator_rights(own, folders)
        case Role.READER:
            tables = [f"{own}timelines/*/tables/*", f"{own}iceberg/*"]
            rights = _Rights([own, *folders], [(["s3:GetObject"], tables)])
        case Role.LANDER:
            rights = _build_lander_rights(folders)
    arn = f"arn:aws:s3:::{bucket}"
    # A LIST of the whole bucket would tell the names of everyone's objects.
    listed = {"StringLike": {"s3:prefix": [f"{folder}*" for folder in rights.listed]}}
    statements = [
        _allow_actions(_BUCKET_FACTS, arn),
        {**_allow_actions(["s3:ListBucket"], arn), "Condition": listed},
        *([_allow_actions(rights.on_bucket, arn)] if rights.on_bucket else []),
    ]
    statements += [
        _allow_actions(actions, *(f"{arn}/{pattern}" for pattern in patterns))
        for actions, patterns in rights.on_objects
        if patterns
    ]
    return {"Version": "2012-10-17", "Statement": statements}


class _Rights(NamedTuple):
    """What a role may do.

    Attributes:
        listed: prefixes below which objects may be listed.
        on_objects: actions, and the patterns of the keys that they are allowed on.
        on_bucket: actions on the bucket itself.
    """

    listed: list[str]
    on_objects: list[tuple[list[str], list[str]]]
    on_bucket: Sequence[str] = ()


def _build_driver_rights(root: str, pipeline: str, inputs: list[str]) -> _Rights:
    batches = f"{root}{pipeline[:50]}__bf_"  # the names of `<p>.backfill`'s batch runs
    pipeline_root = f"{root}{pipeline}/"
    disposable = [f"{root}tidegate-probe/", batches]
    own = [pipeline_root, *disposable]
    deleted = [*disposable, *(pipeline_root + folder for folder in _DELETED_FOLDERS)]
    return _Rights(
        [*own, *inputs],
        [
            (["s3:GetObject", "s3:PutObject", *_MULTIPART_ACTIONS], _match_below(own)),
            (["s3:DeleteObject"], _match_below(deleted)),
            (["s3:GetObject"], _match_below(inputs)),
        ],
        ["s3:ListenBucketNotification", "s3:ListBucketMultipartUploads"],
    )


def _build_operator_rights(own: str, inputs: list[str]) -> _Rights:
    # A restore is a lease and one slot; listing checkpoints fills the index up; `tidegate quality`
    # keeps its reports.
    folders = ("requests/", "splices/", "index/", "quality/", "timelines/*/slots/")
    documents = [f"{own}{name}.json" for name in ("lease", "desired", "roots")]
    # No other deletes: an operator's key must not be able to shorten the log.
    caches = [f"{own}index/", f"{own}quality/"]  # made again from what stays
    return _Rights(
        [own, *inputs],
        [
            (["s3:GetObject"], _match_below([own, *inputs])),
            (["s3:PutObject"], [*_match_below([own + f for f in folders]), *documents]),
            (["s3:DeleteObject"], _match_below(caches)),
        ],
    )


def _build_lander_rights(folders: list[str]) -> _Rights:
    if not folders:
        raise LANDER_WITHOUT_INPUT()
    notes = [f"{folder}_landing/" for folder in folders]
    return _Rights(
        notes,
        [(["s3:GetObject"], _match_below(notes)), (["s3:PutObject"], _match_below(folders))],
    )


def _match_below(prefixes: Sequence[str]) -> list[str]:
    return [f"{prefix}*" for prefix in prefixes]


def _allow_actions(actions: Sequence[str], *resources: str) -> JsonObject:
    """Return the statement of a policy that allows actions on resources."""
    return {"Effect": "Allow", "Action": list(actions), "Resource": list(resources)}


def main(
    role: Annotated[Role, typer.Argument(help="whose keys the policy is for")],
    bucket: Annotated[str, typer.Argument(help="name of the bucket")],
    pipeline: Annotated[str, typer.Argument(help="name of the pipeline")],
    prefix: Annotated[str, typer.Option(help="of the store inside the bucket")] = "",
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", help="prefix that a source reads, or a lander writes; repeat for more"
        ),
    ] = None,
) -> None:
    """Print the policy as JSON."""
    try:
        found = build_policy(role, bucket, pipeline, prefix=prefix, inputs=inputs or ())
    except ConfigurationError as error:
        typer.echo(error, err=True)
        sys.exit(error.failure_class.exit_code)
    typer.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    typer.run(main)
