"""A real MinIO for tests and benches, with one bucket and an application user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from tidegate.checkpoints.s3 import S3Settings
from tidegate.infra.minio import REGION, Credentials, MinioServer, provision
from tidegate.infra.minio_build import ensure_minio

__all__ = ["RealMinio", "running"]


@dataclass(frozen=True)
class RealMinio:
    """A running MinIO with a bucket and an application user. Whoever shares it uses keys of their own and does not kill it."""

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
        return S3Settings(bucket=self.bucket, endpoint=self.server.endpoint, access_key=self.app.access_key, secret_key=secret)


@contextmanager
def running(folder: Path, bucket: str = "tidegate") -> Iterator[RealMinio]:
    """A MinIO with its data in this folder, until the end of the block."""
    server, app = MinioServer(ensure_minio(print), folder / "data", folder / "minio.log"), Credentials.random("app")
    server.start()
    try:
        provision(server, bucket, app)
        yield RealMinio(server, app, bucket)
    finally:
        server.stop()
