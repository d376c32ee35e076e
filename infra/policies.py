"""Bucket policies that give each role only the rights that it needs.

``python -m tidegate.infra.policies driver BUCKET PIPELINE --input inbox/`` prints one.

* ``driver`` may read and write below the pipeline's own prefix, delete there what retention
  deletes, read the pipeline's inputs, and use the folders of the start-up probe and of backfills.
  Airflow has this role too: its tasks start drivers with their own keys, merge, delete what is due
  and compare ranges with batch runs.
* ``executor`` is for the tasks of Spark, if their hosts have keys of their own. They may read the
  inputs, and read and write files of rows; no slot, no lease, no request.
* ``operator`` is for people at a command line. They may read all of the pipeline and its inputs,
  send requests to drivers, make and reject requests of late rows, pin and restore. They may not
  write rows (``splice merge``), delete them (``gc``), approve a merge or write a verdict
  (``quality``).
* ``reader`` may read the tables and what is needed to find them; no leases, no requests, no
  writing.
* ``lander`` is for ``tidegate land``. It may write into the inputs' folders and read its own notes
  there, and nothing of the pipeline.

What exactly a role may do is in ``policies.toml``.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from tidegate.errors import exit_on_error
from tidegate.jobs.spec.pipeline import BATCH_RUN_MARK
from tidegate.json_types import JsonObject, read_data_file

from .errors import LANDER_WITHOUT_INPUT


class Role(StrEnum):
    """Who uses the keys."""

    DRIVER = "driver"
    EXECUTOR = "executor"
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
    if role is Role.LANDER and not inputs:
        raise LANDER_WITHOUT_INPUT()
    root = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    places = {
        "own": [f"{root}{pipeline}/"],
        "probe": [f"{root}tidegate-probe/"],
        "batches": [f"{root}{pipeline[:50]}{BATCH_RUN_MARK}"],
        "inputs": [f"{root}{folder.strip('/')}/" for folder in inputs],
    }

    def expand_patterns(patterns: Sequence[str]) -> list[str]:
        split = [pattern.split("/", 1) for pattern in patterns]
        return [place + rest for name, rest in split for place in places[name]]

    rights = read_data_file(__package__, "policies.toml")
    allowed = rights[role]
    arn = f"arn:aws:s3:::{bucket}"
    # A LIST of the whole bucket would tell the names of everyone's objects.
    listed = {"StringLike": {"s3:prefix": expand_patterns(allowed["listed"])}}
    statements = [
        _allow_actions(rights["facts"], arn),
        {**_allow_actions(["s3:ListBucket"], arn), "Condition": listed},
    ]
    if "bucket" in allowed:
        statements.append(_allow_actions(allowed["bucket"], arn))
    statements += [
        _allow_actions(right["actions"], *(f"{arn}/{key}" for key in keys))
        for right in allowed["objects"]
        if (keys := expand_patterns(right["keys"]))
    ]
    return {"Version": "2012-10-17", "Statement": statements}


def build_bucket_policy(bucket: str) -> JsonObject:
    """Return the policy to read, write, list and delete all objects of a bucket.

    It is for those who run the bucket's pipelines.
    """
    whole, arn = read_data_file(__package__, "policies.toml")["whole"], f"arn:aws:s3:::{bucket}"
    on_bucket, on_objects = (
        _allow_actions(whole["bucket"], arn),
        _allow_actions(whole["objects"], f"{arn}/*"),
    )
    return {"Version": "2012-10-17", "Statement": [on_bucket, on_objects]}


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
    with exit_on_error():
        found = build_policy(role, bucket, pipeline, prefix=prefix, inputs=inputs or ())
    typer.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    typer.run(main)
