"""A store in an S3 bucket, through boto3.

Conditional writes are sent exactly once: a client library that silently repeats a PUT whose answer
was lost meets its own object and reports a loss. All other requests are repeated with jittered
pauses within one time budget per operation. boto3 is imported when the first request is made,
because Airflow imports light parts of this package while parsing DAGs.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, SecretStr

from tidegate.checkpoints.canonical_json import sha256_of_file
from tidegate.checkpoints.store import (
    NotFoundError,
    ObjectInfo,
    OutcomeUnknownError,
    PreconditionFailedError,
    StoreDeniedError,
    StoredObject,
    StoreUnavailableError,
    UploadedObject,
    check_key,
)
from tidegate.errors import TidegateError

_MULTIPART_FROM = (
    64 << 20
)  # bytes; below, one PUT is faster and its checksum covers the whole object
_MAX_LIST_KEYS = 1000  # the most one LIST answers
_FolderNames = list[str]
T = TypeVar("T")


class S3Settings(BaseModel):
    """Where the bucket is and how patient to be with it.

    Attributes:
        endpoint: None for AWS itself.
        access_key: None leaves finding credentials to boto3 (environment, profile, instance role).
        budget: seconds one operation may take with all its repetitions. Conditional writes are
            never repeated.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str = "us-east-1"
    access_key: str | None = None
    secret_key: SecretStr | None = None
    connect_timeout: float = 3.0
    read_timeout: float = 10.0
    budget: float = 15.0

    @classmethod
    def from_environment(cls, bucket: str, prefix: str = "") -> S3Settings:
        """Read TIDEGATE_S3_ENDPOINT, _ACCESS_KEY, _SECRET_KEY and _REGION.

        The one place where they are read.
        """
        secret = os.environ.get("TIDEGATE_S3_SECRET_KEY")
        return cls(
            bucket=bucket,
            prefix=prefix,
            endpoint=os.environ.get("TIDEGATE_S3_ENDPOINT")
            or os.environ.get("AWS_ENDPOINT_URL_S3"),
            region=os.environ.get("TIDEGATE_S3_REGION")
            or os.environ.get("AWS_REGION")
            or "us-east-1",
            access_key=os.environ.get("TIDEGATE_S3_ACCESS_KEY"),
            secret_key=SecretStr(secret) if secret else None,
        )


class S3Store:
    """Objects below `s3://bucket/prefix`."""

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self._prefix = settings.prefix.strip("/") + "/" if settings.prefix.strip("/") else ""
        self.url = f"s3://{settings.bucket}/{self._prefix}".rstrip("/")
        self._clients: dict[int, Any] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> StoredObject:
        """Read one object; boto3 checks the stored checksum.

        Raises NotFoundError when there is none.
        """
        return self._retry_within_budget(lambda: self._get_once(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part of one object."""
        return self._retry_within_budget(lambda: self._get_range_once(key, start, length))

    def stat(self, key: str) -> ObjectInfo | None:
        """Describe one object, or None when there is none."""
        return self._retry_within_budget(lambda: self._stat_once(key))

    def create(self, key: str, data: bytes) -> str:
        """PUT If-None-Match: *, sent once."""
        return self._put_object(key, data, IfNoneMatch="*")

    def compare_and_swap(self, key: str, data: bytes, etag: str) -> str:
        """PUT If-Match, sent once."""
        return self._put_object(key, data, IfMatch=f'"{etag}"')

    def put(self, key: str, data: bytes) -> str:
        """PUT without any condition."""
        return self._retry_within_budget(lambda: self._put_object(key, data))

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        """Objects under `prefix`, a page at a time."""
        left = limit
        arguments: dict[str, Any] = (
            {"StartAfter": self._full_key(start_after)} if start_after else {}
        )
        while left is None or left > 0:
            page = self._list_one_page(
                prefix,
                arguments,
                MaxKeys=_MAX_LIST_KEYS if left is None else min(left, _MAX_LIST_KEYS),
            )
            # After exactly 1,000 keys comes one more page, without Contents.
            entries = [self._to_object_info(item) for item in page.get("Contents", [])]
            yield from entries
            left = None if left is None else left - len(entries)
            if not page.get("IsTruncated"):
                return
            arguments = {"ContinuationToken": page["NextContinuationToken"]}

    def list_folders(self, prefix: str) -> _FolderNames:
        """Folder names directly under `prefix`."""
        names: _FolderNames = []
        arguments: dict[str, Any] = {}
        while True:
            page = self._list_one_page(prefix, arguments, Delimiter="/")
            names += [
                item["Prefix"][len(self._prefix + prefix) : -1]
                for item in page.get("CommonPrefixes", [])
            ]
            if not page.get("IsTruncated"):
                return sorted(names)
            arguments = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, key: str) -> None:
        """Remove an object; silent when there is none."""
        self._retry_within_budget(lambda: self._call_api("delete_object", key, writes=True))

    def upload(self, path: Path, key: str) -> UploadedObject:
        """Store a file; large ones in parts."""
        digest, size = sha256_of_file(path), path.stat().st_size
        self._retry_within_budget(lambda: self._upload_once(path, key))
        stored = self.stat(key)
        if stored is None or stored.size != size:
            raise OutcomeUnknownError.for_uri(
                self.uri(key), f"{stored.size if stored else 'nothing'} of {size} bytes arrived"
            )
        return UploadedObject(key, stored.etag, size, digest)

    def download(self, key: str, path: Path) -> None:
        """Copy an object into a file, which appears whole or not at all."""
        self._retry_within_budget(lambda: self._download_once(key, path))

    def local_path(self, key: str) -> Path | None:
        """A bucket has no paths."""
        return None

    def uri(self, key: str) -> str:
        """`s3://bucket/prefix/key`."""
        return f"s3://{self.settings.bucket}/{self._full_key(key)}"

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _full_key(self, key: str) -> str:
        return self._prefix + key

    def _get_once(self, key: str) -> StoredObject:
        def read_object() -> StoredObject:
            answer = self._get_client().get_object(
                Bucket=self.settings.bucket, Key=self._full_key(check_key(key))
            )
            return StoredObject(key, answer["Body"].read(), answer["ETag"].strip('"'))

        return self._run_translated(read_object, key)

    def _get_range_once(self, key: str, start: int, length: int) -> bytes:
        def read_range() -> bytes:
            wanted = f"bytes={start}-{start + length - 1}"
            answer = self._get_client().get_object(
                Bucket=self.settings.bucket, Key=self._full_key(check_key(key)), Range=wanted
            )
            return bytes(answer["Body"].read())

        return self._run_translated(read_range, key)

    def _stat_once(self, key: str) -> ObjectInfo | None:
        try:
            answer = self._call_api("head_object", key)
        except NotFoundError:
            return None
        return ObjectInfo(
            key,
            answer["ContentLength"],
            answer["ETag"].strip('"'),
            answer["LastModified"].timestamp(),
        )

    def _put_object(self, key: str, data: bytes, **condition: str) -> str:
        answer = self._call_api("put_object", key, writes=True, Body=data, **condition)
        return str(answer["ETag"]).strip('"')

    def _list_one_page(self, prefix: str, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
        def request_page() -> dict[str, Any]:
            client = self._get_client()
            answer = client.list_objects_v2(
                Bucket=self.settings.bucket, Prefix=self._full_key(prefix), **arguments, **more
            )
            return dict(answer)

        return self._retry_within_budget(lambda: self._run_translated(request_page, prefix))

    def _to_object_info(self, item: dict[str, Any]) -> ObjectInfo:
        key = item["Key"][len(self._prefix) :]
        return ObjectInfo(
            key, item["Size"], item["ETag"].strip('"'), item["LastModified"].timestamp()
        )

    def _upload_once(self, path: Path, key: str) -> None:
        from boto3.s3.transfer import TransferConfig

        arguments = {
            "Filename": str(path),
            "Bucket": self.settings.bucket,
            "Key": self._full_key(check_key(key)),
            "Config": TransferConfig(
                multipart_threshold=_MULTIPART_FROM, multipart_chunksize=_MULTIPART_FROM // 2
            ),
        }
        self._run_translated(
            lambda: self._get_client(attempts=3).upload_file(**arguments), key, writes=True
        )

    def _download_once(self, key: str, path: Path) -> None:
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        try:
            client = self._get_client(attempts=3)
            self._run_translated(
                lambda: client.download_file(
                    self.settings.bucket, self._full_key(check_key(key)), str(part)
                ),
                key,
            )
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _call_api(
        self, name: str, key: str, *, writes: bool = False, **arguments: Any
    ) -> dict[str, Any]:
        def call_method() -> dict[str, Any]:
            method = getattr(self._get_client(), name)
            return dict(
                method(Bucket=self.settings.bucket, Key=self._full_key(check_key(key)), **arguments)
            )

        return self._run_translated(call_method, key, writes=writes)

    def _run_translated(self, ask: Callable[[], T], key: str, *, writes: bool = False) -> T:
        """Run one request and turn what botocore raises into our errors."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return ask()
        except (BotoCoreError, ClientError, Boto3Error) as error:
            cause = (
                error.__context__ if isinstance(error, Boto3Error) and error.__context__ else error
            )
            raise self._translate_error(cause, key, writes) from error

    def _translate_error(self, error: BaseException, key: str, writes: bool) -> TidegateError:
        from botocore.exceptions import (
            ClientError,
            ConnectTimeoutError,
            EndpointConnectionError,
            NoCredentialsError,
            PartialCredentialsError,
            SSLError,
        )

        if isinstance(error, ClientError):
            return self._translate_response(error.response, key, writes)
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return self._denied_error(str(error))
        if isinstance(error, EndpointConnectionError | ConnectTimeoutError):
            return StoreUnavailableError.for_uri(
                self._describe_location(), "cannot connect"
            )  # nothing was sent, so nothing is unknown
        if (
            isinstance(error, SSLError) and "certificate verify failed" in str(error).lower()
        ):  # refused before anything was sent
            why = (
                str(error).partition("certificate verify failed:")[2].partition("(")[0].strip()
                or "it cannot be verified"
            )
            return StoreUnavailableError.for_uri(
                self._describe_location(),
                f"its certificate: {why}; AWS_CA_BUNDLE names a private CA's file",
            )
        kind = OutcomeUnknownError if writes else StoreUnavailableError
        return kind.for_uri(self.uri(key), type(error).__name__)

    def _translate_response(
        self, response: dict[str, Any], key: str, writes: bool
    ) -> TidegateError:
        """Sort the server's answers.

        Definite ones by their code, busy and broken ones as unknown for writes.
        """
        code = str(response.get("Error", {}).get("Code", ""))
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code == "NoSuchBucket" or (status == 404 and key == ""):
            return self._denied_error(f"bucket {self.settings.bucket} does not exist")
        if status == 412 or (
            status == 404 and writes
        ):  # MinIO answers a swap of a missing key with 404
            return PreconditionFailedError.for_uri(
                self.uri(key), "the version asked for", code or str(status)
            )
        if status == 404:
            return NotFoundError.for_uri(self.uri(key))
        if status in (301, 307, 400, 401, 403) and code not in ("RequestTimeout", "SlowDown"):
            return self._denied_error(
                f"{code or status}: {response.get('Error', {}).get('Message', '')}"
            )
        if status == 507 or code == "XMinioStorageFull":
            return StoreUnavailableError.for_full_disk(self.uri(key), f"{status} {code}")
        # 409 (a conflicting write under way), 408, 429, 5xx: it may or may not have happened.
        kind = OutcomeUnknownError if writes else StoreUnavailableError
        return kind.for_uri(self.uri(key), f"{status} {code}")

    def _denied_error(self, cause: str) -> StoreDeniedError:
        return StoreDeniedError(
            f"{self._describe_location()} refuses: {cause}",
            code="store.denied",
            kept="everything in the bucket",
            advice=(
                "check TIDEGATE_S3_ENDPOINT, TIDEGATE_S3_ACCESS_KEY, TIDEGATE_S3_SECRET_KEY, the"
                " region and the bucket's name"
            ),
        )

    def _describe_location(self) -> str:
        return f"{self.url} at {self.settings.endpoint or 'AWS'}"

    def _retry_within_budget(self, ask: Callable[[], T]) -> T:
        from tenacity import (
            Retrying,
            retry_if_exception_type,
            stop_before_delay,
            wait_random_exponential,
        )

        retrying = Retrying(
            stop=stop_before_delay(self.settings.budget),
            wait=wait_random_exponential(multiplier=0.1, max=2.0),
            retry=retry_if_exception_type((StoreUnavailableError, OutcomeUnknownError)),
            reraise=True,
        )
        return retrying(ask)

    def _get_client(self, attempts: int = 1) -> Any:
        """A boto3 client.

        `attempts` above 1 only for transfers in parts, which are not conditional.
        """
        with self._lock:
            if attempts not in self._clients:
                self._clients[attempts] = _make_s3_client(self.settings, attempts)
            return self._clients[attempts]


def _make_s3_client(settings: S3Settings, attempts: int) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"total_max_attempts": attempts, "mode": "standard"},
        connect_timeout=settings.connect_timeout,
        read_timeout=settings.read_timeout,
        max_pool_connections=32,
        s3={"addressing_style": "path"} if settings.endpoint else {},
    )
    return boto3.session.Session().client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region,
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=(
            settings.secret_key.get_secret_value() if settings.secret_key else None
        ),
        config=config,
    )
