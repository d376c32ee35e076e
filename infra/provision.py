"""Makes a bucket on a MinIO, and gives a user rights in it.

``python -m tidegate.infra.provision [--policy FILE] [--only]`` reads bucket, server and keys from
the environment: ``TIDEGATE_STORE``, ``TIDEGATE_S3_ENDPOINT``, the root's ``MINIO_ROOT_USER`` and
``MINIO_ROOT_PASSWORD``, the user's ``TIDEGATE_S3_ACCESS_KEY`` and ``TIDEGATE_S3_SECRET_KEY``.
`AWS_CA_BUNDLE` names the file of a private CA.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from tidegate.errors import exit_on_error
from tidegate.json_types import JsonView

from .errors import (
    MINIO_AWAY,
    MINIO_REFUSED,
    POLICY_UNREADABLE,
    STORE_NOT_A_BUCKET,
    VARIABLES_MISSING,
)
from .policies import build_bucket_policy

REGION = "us-east-1"
_REQUIRED_VARIABLES = (
    "TIDEGATE_STORE",
    "TIDEGATE_S3_ENDPOINT",
    "MINIO_ROOT_USER",
    "MINIO_ROOT_PASSWORD",
    "TIDEGATE_S3_ACCESS_KEY",
    "TIDEGATE_S3_SECRET_KEY",
)


@dataclass(frozen=True)
class Credentials:
    """A pair of keys. The secret is not in `repr`, so that no log line can contain it."""

    access_key: str
    secret_key: str = field(repr=False)

    @classmethod
    def generate(cls, prefix: str) -> Credentials:
        """Return new keys.

        The access key begins with the prefix, so that people can tell keys apart.
        """
        return cls(f"{prefix}-{secrets.token_hex(4)}", secrets.token_urlsafe(30))


def grant_policy(
    endpoint: str,
    root: Credentials,
    bucket: str,
    user: Credentials,
    rights: JsonView,
    *,
    only: bool = False,
) -> int:
    """Make the bucket and the user, and give the user a policy. May be repeated.

    A user that exists gets the secret key of `user`.
    The name of a policy is a hash of its content. So one key may have the policies of several
    pipelines, and has each only once.

    Args:
        endpoint: of the MinIO.
        root: its root user's keys.
        bucket: name of the bucket.
        user: keys of the user.
        rights: the policy.
        only: take away the policies that the user had before.

    Returns:
        The number of other policies that the user keeps.

    Raises:
        TransientError: the server cannot be reached.
        ConfigurationError: it refused, for example the keys.
    """
    # Late: minio costs 0.2 s, and `tidegate --help` must not pay it.
    from minio import Minio, MinioAdmin
    from minio.credentials.providers import StaticProvider
    from minio.error import MinioException
    from urllib3 import PoolManager, Retry, Timeout
    from urllib3.exceptions import HTTPError

    address = urlsplit(endpoint)
    http = PoolManager(
        timeout=Timeout(connect=5.0, read=30.0),
        retries=Retry(total=3, backoff_factor=0.5),
        ca_certs=os.environ.get("AWS_CA_BUNDLE"),
    )
    both: dict[str, Any] = {
        "endpoint": address.netloc,
        "secure": address.scheme == "https",
        "http_client": http,
    }
    keys = StaticProvider(root.access_key, root.secret_key)
    client, admin = (
        Minio(credentials=keys, region=REGION, **both),
        MinioAdmin(credentials=keys, **both),
    )
    # The name is a digest of the rights, so that equal rights are one policy of the server.
    name = (
        f"tidegate-{hashlib.sha256(json.dumps(rights, sort_keys=True).encode()).hexdigest()[:16]}"
    )
    try:
        if not client.bucket_exists(bucket_name=bucket):
            client.make_bucket(bucket_name=bucket)
        admin.user_add(user.access_key, user.secret_key)
        # `policy_set` replaces the list of a user's policies, so the others are named again.
        admin.policy_add(name, policy=dict(rights))
        before = str(json.loads(admin.user_info(user.access_key)).get("policyName") or "")
        kept = set() if only else {other for other in before.split(",") if other} - {name}
        admin.policy_set(",".join(sorted({name, *kept})), user=user.access_key)
        return len(kept)
    except HTTPError as error:
        raise MINIO_AWAY(endpoint=endpoint, error=error) from error
    except (MinioException, ValueError) as error:
        raise MINIO_REFUSED(endpoint=endpoint, error=error) from error


def main(
    policy: Annotated[
        Path | None,
        typer.Option(help="what tidegate.infra.policies printed; default: all of the bucket"),
    ] = None,
    only: Annotated[
        bool, typer.Option("--only", help="take away what the user was given before")
    ] = False,
) -> None:
    """Make the bucket and the user that the environment names, and give the user rights."""
    with exit_on_error():
        # All at once, so that a person corrects the environment in one go.
        missing = [name for name in _REQUIRED_VARIABLES if not os.environ.get(name)]
        if missing:
            raise VARIABLES_MISSING(names=", ".join(missing))
        store, endpoint, *keys = (os.environ[name] for name in _REQUIRED_VARIABLES)
        bucket = urlsplit(store).netloc
        if not store.startswith("s3://") or not bucket:
            raise STORE_NOT_A_BUCKET(store=store)
        try:
            # Before the first request: a bad file must change nothing on the server.
            rights = (
                json.loads(policy.read_text("utf-8")) if policy else build_bucket_policy(bucket)
            )
        except (OSError, ValueError) as error:
            raise POLICY_UNREADABLE(file=policy, error=error) from error
        root, user = Credentials(*keys[:2]), Credentials(*keys[2:])
        kept = grant_policy(endpoint, root, bucket, user, rights, only=only)
    more = f", and keeps {kept} other policies (--only takes them away)" if kept else ""
    typer.echo(
        f"bucket {bucket}: {user.access_key} has "
        + (f"the rights of {policy}" if policy else "all of it")
        + more
    )


if __name__ == "__main__":
    typer.run(main)
