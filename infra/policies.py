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
from typing import Annotated, Any

import typer

from tidegate.errors import ConfigurationError
from tidegate.infra.errors import LANDER_WITHOUT_INPUT

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
) -> dict[str, Any]:
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
            statements = _build_driver_statements(bucket, root, pipeline, folders)
        case Role.OPERATOR:
            statements = _build_operator_statements(bucket, own, folders)
        case Role.READER:
            statements = [
                _allow_listing(bucket, [own, *folders]),
                _allow_actions(
                    ["s3:GetObject"],
                    *_format_object_arns(bucket, [f"{own}timelines/*/tables/", f"{own}iceberg/"]),
                ),
            ]
        case Role.LANDER:
            statements = _build_lander_statements(bucket, folders)
    return {
        "Version": "2012-10-17",
        "Statement": [
            _allow_actions(
                # The last two show rules that would break the log (`list_bucket_hazards`).
                [
                    "s3:GetBucketLocation",
                    "s3:GetLifecycleConfiguration",
                    "s3:GetReplicationConfiguration",
                ],
                f"arn:aws:s3:::{bucket}",
            ),
            *statements,
        ],
    }


def _build_driver_statements(
    bucket: str, root: str, pipeline: str, inputs: list[str]
) -> list[dict[str, Any]]:
    batches = f"{root}{pipeline[:50]}__bf_"  # the names of `<p>.backfill`'s batch runs
    pipeline_root = f"{root}{pipeline}/"
    disposable = [f"{root}tidegate-probe/", batches]
    own = [pipeline_root, *disposable]
    deleted = [*disposable, *(pipeline_root + folder for folder in _DELETED_FOLDERS)]
    listen = ["s3:ListenBucketNotification", "s3:ListBucketMultipartUploads"]
    return [
        _allow_listing(bucket, [*own, *inputs]),
        _allow_actions(listen, f"arn:aws:s3:::{bucket}"),
        _allow_actions(
            ["s3:GetObject", "s3:PutObject", *_MULTIPART_ACTIONS], *_format_object_arns(bucket, own)
        ),
        _allow_actions(["s3:DeleteObject"], *_format_object_arns(bucket, deleted)),
        *(
            [_allow_actions(["s3:GetObject"], *_format_object_arns(bucket, inputs))]
            if inputs
            else []
        ),
    ]


def _build_operator_statements(bucket: str, own: str, inputs: list[str]) -> list[dict[str, Any]]:
    # A restore is a lease and one slot; listing checkpoints fills the index up; `tidegate quality`
    # keeps its reports.
    folders = [
        own + folder
        for folder in ("requests/", "splices/", "index/", "quality/", "timelines/*/slots/")
    ]
    documents = [
        f"arn:aws:s3:::{bucket}/{own}{name}.json" for name in ("lease", "desired", "roots")
    ]
    # No other deletes: an operator's key must not be able to shorten the log.
    caches = [f"{own}index/", f"{own}quality/"]  # made again from what stays
    return [
        _allow_listing(bucket, [own, *inputs]),
        _allow_actions(["s3:GetObject"], *_format_object_arns(bucket, [own, *inputs])),
        _allow_actions(["s3:PutObject"], *_format_object_arns(bucket, folders), *documents),
        _allow_actions(["s3:DeleteObject"], *_format_object_arns(bucket, caches)),
    ]


def _build_lander_statements(bucket: str, folders: list[str]) -> list[dict[str, Any]]:
    if not folders:
        raise LANDER_WITHOUT_INPUT()
    notes = [f"{folder}_landing/" for folder in folders]
    return [
        _allow_listing(bucket, notes),
        _allow_actions(["s3:GetObject"], *_format_object_arns(bucket, notes)),
        _allow_actions(["s3:PutObject"], *_format_object_arns(bucket, folders)),
    ]


def _allow_actions(actions: list[str], *resources: str) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": actions, "Resource": list(resources)}


def _format_object_arns(bucket: str, prefixes: Sequence[str]) -> list[str]:
    return [f"arn:aws:s3:::{bucket}/{prefix}*" for prefix in prefixes]


def _allow_listing(bucket: str, prefixes: Sequence[str]) -> dict[str, Any]:
    """Listing is allowed below these prefixes only.

    A LIST of the whole bucket would tell the names of everyone's objects.
    """
    condition = {"StringLike": {"s3:prefix": [f"{prefix}*" for prefix in prefixes]}}
    return {**_allow_actions(["s3:ListBucket"], f"arn:aws:s3:::{bucket}"), "Condition": condition}


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
