"""Bucket policies with as little in them as each role needs.

``python -m tidegate.infra.policies driver BUCKET PIPELINE --input inbox/`` prints one.

* ``driver``: everything below the pipeline's own prefix, reading its inputs, and the one folder the start-up probe writes to.
* ``reader``: tables and what finds them. No leases, no requests, no writing.
* ``operator``: Airflow and the command line: like a reader, and requests, restores, pins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

__all__ = ["Role", "policy"]

_MULTIPART = ["s3:ListMultipartUploadParts", "s3:AbortMultipartUpload"]


class Role(StrEnum):
    """Who uses the keys."""

    DRIVER = "driver"
    OPERATOR = "operator"
    READER = "reader"


def policy(role: Role, bucket: str, pipeline: str, *, prefix: str = "", inputs: Sequence[str] = ()) -> dict[str, Any]:
    """The policy of a role for one pipeline.

    Args:
        role: who.
        bucket: where.
        pipeline: its name.
        prefix: of the store inside the bucket (``s3://bucket/prefix``).
        inputs: prefixes that the sources read, relative to the store.
    """
    root = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    own, probe = f"{root}{pipeline}/", f"{root}tidegate-probe/"
    reads = [own, *(root + folder.strip("/") + "/" for folder in inputs)]
    statements = [
        _statement(["s3:GetBucketLocation"], f"arn:aws:s3:::{bucket}"),
        _listing(bucket, [*reads, probe] if role is Role.DRIVER else reads),
    ]
    if role is Role.DRIVER:
        listen = ["s3:ListenBucketNotification", "s3:ListBucketMultipartUploads"]
        statements.append(_statement(listen, f"arn:aws:s3:::{bucket}"))
        statements.append(_statement(["s3:GetObject"], *_objects(bucket, reads)))
        writes = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", *_MULTIPART]
        statements.append(_statement(writes, *_objects(bucket, [own, probe])))
    elif role is Role.OPERATOR:
        statements.append(_statement(["s3:GetObject"], *_objects(bucket, reads)))
        places = [
            "requests/",
            "acks/",
            "trail/",
            "logs/",
            "quality/",
            "timelines/*/slots/",
            "lease.json",
            "desired.json",
            "roots.json",
        ]
        statements.append(
            _statement(["s3:PutObject"], *(f"arn:aws:s3:::{bucket}/{own}{p}{'*' if p[-1] == '/' else ''}" for p in places))
        )
    else:
        statements.append(_statement(["s3:GetObject"], *_objects(bucket, [f"{own}timelines/*/tables/", f"{own}iceberg/"])))
    return {"Version": "2012-10-17", "Statement": statements}


def _statement(actions: list[str], *resources: str) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": actions, "Resource": list(resources)}


def _objects(bucket: str, prefixes: Sequence[str]) -> list[str]:
    return [f"arn:aws:s3:::{bucket}/{prefix}*" for prefix in prefixes]


def _listing(bucket: str, prefixes: Sequence[str]) -> dict[str, Any]:
    """Listing is allowed below these prefixes only: a LIST of the whole bucket would tell the names of everybody's objects."""
    condition = {"StringLike": {"s3:prefix": [f"{prefix}*" for prefix in prefixes]}}
    return {**_statement(["s3:ListBucket"], f"arn:aws:s3:::{bucket}"), "Condition": condition}


def main(
    role: Annotated[Role, typer.Argument(help="whose keys the policy is for")],
    bucket: Annotated[str, typer.Argument(help="name of the bucket")],
    pipeline: Annotated[str, typer.Argument(help="name of the pipeline")],
    prefix: Annotated[str, typer.Option(help="of the store inside the bucket")] = "",
    inputs: Annotated[list[str] | None, typer.Option("--input", help="prefix that a source reads; repeat for more")] = None,
) -> None:
    """Print the policy as JSON."""
    typer.echo(json.dumps(policy(role, bucket, pipeline, prefix=prefix, inputs=inputs or ()), indent=2))


if __name__ == "__main__":
    typer.run(main)
