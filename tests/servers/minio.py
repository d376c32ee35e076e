"""A real MinIO for tests and benches, with one bucket and an application user."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
from botocore.exceptions import BotoCoreError, ClientError
from pydantic import SecretStr

from tests.servers.certificates import make_certificate
from tidegate.checkpoints.s3_store import S3Settings
from tidegate.infra.minio_server import MinioServer, ensure_minio, provision_bucket
from tidegate.infra.provision import REGION, Credentials


@dataclass(frozen=True)
class RealMinio:
    """A running MinIO with a bucket and an application user.

    Whoever shares it uses keys of their own and does not kill it.
    """

    server: MinioServer
    app: Credentials
    bucket: str

    def environment(self) -> dict[str, str]:
        """What tidegate's S3 store reads."""
        return {
            "TIDEGATE_S3_ENDPOINT": self.server.endpoint,
            "TIDEGATE_S3_ACCESS_KEY": self.app.access_key,
            "TIDEGATE_S3_SECRET_KEY": self.app.secret_key,
            "TIDEGATE_S3_REGION": REGION,
        }

    def settings(self) -> S3Settings:
        """The same for `S3Store`."""
        secret = SecretStr(self.app.secret_key)
        return S3Settings(
            bucket=self.bucket,
            endpoint=self.server.endpoint,
            access_key=self.app.access_key,
            secret_key=secret,
        )


@contextmanager
def running(folder: Path, bucket: str = "tidegate") -> Iterator[RealMinio]:
    """A MinIO with its data in this folder, until the end of the block."""
    server, app = (
        MinioServer(ensure_minio(print), folder / "data", folder / "minio.log"),
        Credentials.generate("app"),
    )
    server.start()
    try:
        provision_bucket(server, bucket, app)
        yield RealMinio(server, app, bucket)
    finally:
        server.stop()


@dataclass(frozen=True)
class CertifiedMinio:
    """A MinIO over TLS, and the file of the CA of our own that signed its certificate."""

    server: MinioServer
    bucket: str
    ca: Path

    def settings(self, prefix: str = "") -> S3Settings:
        """For `S3Store`, as the root user."""
        root, secret = self.server.root, SecretStr(self.server.root.secret_key)
        endpoint = self.server.endpoint.replace("http://", "https://")
        return S3Settings(
            bucket=self.bucket,
            prefix=prefix,
            endpoint=endpoint,
            access_key=root.access_key,
            secret_key=secret,
        )


@contextmanager
def certified(folder: Path, bucket: str = "tls") -> Iterator[CertifiedMinio]:
    """A MinIO over TLS with its data in this folder, until the end of the block.

    It takes writes.
    """
    server = MinioServer(ensure_minio(print), folder / "data", folder / "minio.log")
    ca = make_certificate(folder, folder / "minio-certs")
    (folder / "data" / bucket).mkdir(parents=True)  # a folder is a bucket
    server.start_process()
    try:
        deadline = time.monotonic() + 240
        while not _listens(server.port):
            assert time.monotonic() < deadline, "MinIO does not listen"
            time.sleep(0.1)
        found = CertifiedMinio(server, bucket, ca)
        while not _takes_writes(found):
            assert time.monotonic() < deadline, "MinIO takes no writes"
            time.sleep(0.1)
        yield found
    finally:
        server.stop()


def _takes_writes(minio: CertifiedMinio) -> bool:
    """Whether it has started: before, it listens and answers 503."""
    settings = minio.settings()
    client = boto3.client(
        "s3",
        endpoint_url=settings.endpoint,
        aws_access_key_id=minio.server.root.access_key,
        aws_secret_access_key=minio.server.root.secret_key,
        region_name=REGION,
        verify=str(minio.ca),
    )
    with closing(client):
        try:
            client.put_object(Bucket=minio.bucket, Key="started", Body=b"")
            client.delete_object(Bucket=minio.bucket, Key="started")
        except (BotoCoreError, ClientError):
            return False
    return True


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
