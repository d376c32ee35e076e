"""Rights in the bucket on a cluster: MinIO denies the rows to the driver and allows them to tasks.

The five checks see what a driver does. Here it could not do it: its user may read and write everything
but files of rows. It may read the input, because MinIO has one right for a row and for the size of an
object, which the driver asks for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tests.rows_on_spark.requests import TABLES_OF_DRIVER
from tests.servers.minio import RealMinio
from tidegate.checkpoints.executor_keys import EXECUTOR_VARIABLES
from tidegate.infra.policies import Role, build_bucket_policy, build_policy
from tidegate.infra.provision import Credentials, grant_policy
from tidegate.jobs.spec.operations import FilesSinkSpec
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, PipelineSpec


def grant_rights(
    minio: RealMinio,
    driver: Credentials,
    executors: Credentials,
    spec: PipelineSpec,
    prefix: str,
) -> None:
    """Let the driver's user do everything but touch rows, and give executors their role.

    Args:
        minio: the server.
        driver: keys of the driver.
        executors: keys of the executors.
        spec: the pipeline.
        prefix: of the store in the bucket.
    """
    inputs = [source.path for source in spec.sources.values()]
    folders = [sink.path for sink in spec.sinks.values() if isinstance(sink, FilesSinkSpec)]
    _grant(minio, driver, _build_driver_policy(minio, spec, prefix))
    _grant(minio, executors, _build_role(Role.EXECUTOR, minio, spec, prefix, inputs))
    if folders:  # relative ones, in the pipeline's store
        _grant(minio, executors, _build_role(Role.LANDER, minio, spec, prefix, folders))


def build_executor_environment(keys: Credentials) -> dict[str, str]:
    """Return the variables of an executor with keys of its own."""
    own = dict.fromkeys(EXECUTOR_VARIABLES, "")
    own["TIDEGATE_EXECUTOR_S3_ACCESS_KEY"] = keys.access_key
    own["TIDEGATE_EXECUTOR_S3_SECRET_KEY"] = keys.secret_key
    return own


def build_driver_environment(keys: Credentials | None) -> dict[str, str]:
    """Return this process's environment without executors' keys, and with these of the store."""
    found = {name: text for name, text in os.environ.items() if name not in EXECUTOR_VARIABLES}
    if keys is not None:
        found["TIDEGATE_S3_ACCESS_KEY"] = keys.access_key
        found["TIDEGATE_S3_SECRET_KEY"] = keys.secret_key
    return found


def _build_driver_policy(minio: RealMinio, spec: PipelineSpec, prefix: str) -> dict[str, Any]:
    """Return all rights in the bucket, but none to read or write objects that hold rows."""
    arn = f"arn:aws:s3:::{minio.bucket}/{prefix}"
    own = f"{arn}/{spec.name}"
    # The file of dead letters that the driver itself writes lies beside those of tasks.
    free = {*TABLES_OF_DRIVER, *spec.windows, DEAD_LETTERS}
    denied = [f"{own}/timelines/*/tables/{one}/*" for one in spec.table_names if one not in free]
    denied += [f"{own}/staging/*", f"{own}/iceberg/*/merged/*"]
    found: dict[str, Any] = dict(build_bucket_policy(minio.bucket))
    actions = ["s3:GetObject", "s3:PutObject"]
    deny = {"Effect": "Deny", "Action": actions, "Resource": denied}
    return {**found, "Statement": [*found["Statement"], deny]}


def _build_role(
    role: Role, minio: RealMinio, spec: PipelineSpec, prefix: str, folders: Sequence[str]
) -> dict[str, Any]:
    return dict(build_policy(role, minio.bucket, spec.name, prefix=prefix, inputs=folders))


def _grant(minio: RealMinio, user: Credentials, rights: dict[str, Any]) -> None:
    grant_policy(minio.server.endpoint, minio.server.root, minio.bucket, user, rights)
