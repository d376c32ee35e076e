"""How rows get from the driver's files to Spark's tasks and back.

Over a disk that both see, or through the bucket.

All that tasks read or write is named by paths below the driver's scratch folder. With `staging:
disk` paths are the addresses. With `staging: bucket` the folder has a mirror in the bucket,
``<pipeline>/staging/<driver>/``: what tasks shall read is uploaded there first, what they wrote is
fetched from there, and with an epoch its part of the mirror goes. Tasks then need S3A and the
store's keys, which reach them as settings of the session and never as arguments of a process.
"""

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.executor_keys import EXECUTOR_VARIABLES
from tidegate.checkpoints.s3_store import S3Settings
from tidegate.checkpoints.store import Store, map_in_threads
from tidegate.errors import TidegateError, TransientError
from tidegate.jobs.spec.pipeline import PipelineSpec

from .errors import BUCKET_UNREADABLE, NO_SHARED_DISK, STAGING_NEEDS_S3
from .python_tasks import have_executors_keys
from .spark_session import (
    SPARK_ERRORS,
    SparkSessions,
    detect_lost_executors,
    extract_cause,
    runs_on_one_host,
)

_PROBE_FILE = "probe.txt"
# No epoch takes a day, so what is older was left by a driver that died.
_STALE_SECONDS = 86_400.0
_PARALLEL_REQUESTS = 8  # requests: they wait for the network, not for a core
_PROVIDER = "fs.s3a.aws.credentials.provider"
# Of the SDK: S3A's own default reads neither profiles nor tokens of a web identity.
_DEFAULT_PROVIDER = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
_KEYS_PROVIDER = "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"
_TOKEN_PROVIDER = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"
_COMMIT_OPTIONS = {
    # In a bucket a rename is a copy. Nothing is read before the job has ended, so its tasks may
    # commit their files one by one.
    "mapreduce.fileoutputcommitter.algorithm.version": "2",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}


class Staging:
    """Tasks' view of the scratch folder: driver and tasks see one disk at one path.

    Safe to use from several threads.
    """

    def address(self, path: Path) -> str:
        """Where tasks find a file or folder of the scratch folder."""
        return str(path)

    def expose_file(self, path: Path, key: str | None = None) -> str:
        """Make a file readable for tasks and return its address.

        `key` names an object of the store with the same bytes.
        """
        return str(path)

    def write_rows(self, rows: DataFrame, folder: Path) -> list[Path]:
        """Let tasks write rows as Parquet into a new folder below the scratch folder.

        Returns:
            The files, on this disk; some may have no row.
        """
        rows.write.parquet(str(folder))
        return sorted(folder.glob("part-*.parquet"))

    def discard(self, folder: Path) -> None:
        """Remove what only tasks need of this folder; the caller removes the folder itself."""

    def find_outage(self) -> TidegateError | None:
        """The error, if tasks may have failed by no fault of the rows; None if none is known.

        A disk has no outage of its own.
        """
        return None


class BucketStaging(Staging):
    """A mirror of the scratch folder in the bucket.

    Args:
        store: the pipeline's, in S3.
        pipeline: its name.
        workdir: the scratch folder; its name is the mirror's and no one else's.
    """

    def __init__(self, store: Store, pipeline: str, workdir: Path) -> None:
        self._store, self._workdir = store, workdir
        self._all = BucketLayout(pipeline).staging_prefix
        self._root = f"{self._all}{workdir.name}/"
        self._there: set[str] = set()
        self._lock = threading.Lock()

    def address(self, path: Path) -> str:
        """Its address in the mirror."""
        return self._s3a_address(self._mirror_key(path))

    def expose_file(self, path: Path, key: str | None = None) -> str:
        """Upload a file once, unless the store has it under `key`, and return its address."""
        # The store has the object under that key already.
        if key is not None:
            return self._s3a_address(key)
        mirrored = self._mirror_key(path)
        with self._lock:
            there = mirrored in self._there
        if not there:
            self._store.upload(path, mirrored)
            self._record_mirrored([mirrored])
        return self._s3a_address(mirrored)

    def write_rows(self, rows: DataFrame, folder: Path) -> list[Path]:
        """Let tasks write rows to the mirror, and fetch the files."""
        base = f"{self._mirror_key(folder)}/"
        rows.write.options(**_COMMIT_OPTIONS).parquet(self._s3a_address(base))
        names = sorted(entry.key[len(base) :] for entry in self._store.list_objects(f"{base}part-"))
        folder.mkdir(parents=True, exist_ok=True)
        map_in_threads(
            lambda name: self._store.download(base + name, folder / name), names, _PARALLEL_REQUESTS
        )
        self._record_mirrored(base + name for name in names)
        return [folder / name for name in names]

    def discard(self, folder: Path) -> None:
        """Remove this part of the mirror.

        What a store that is away keeps of it, a later driver removes.
        """
        base = self._root if folder == self._workdir else f"{self._mirror_key(folder)}/"
        with self._lock:
            self._there = {key for key in self._there if not key.startswith(base)}
        with contextlib.suppress(TransientError):
            self._delete_objects([entry.key for entry in self._store.list_objects(base)])

    def find_outage(self) -> TidegateError | None:
        """The error of a store that does not answer the driver now, nor tasks before; else None."""
        try:
            self._store.stat(self._root + _PROBE_FILE)
        except TransientError as error:
            return error
        return None

    def verify_access(self, session: SparkSession) -> None:
        """Check that tasks can read what the driver writes, and remove files older than a day.

        Those were left by earlier drivers.

        Raises:
            PySparkException: tasks cannot; or a Py4JJavaError.
            TransientError: the store does not answer.
        """
        # Written by the driver and read by a task: both sides' credentials and the network are
        # proven.
        self._store.put(self._root + _PROBE_FILE, b"seen\n")
        session.read.text(self._s3a_address(self._root + _PROBE_FILE)).collect()
        found = {entry.key: entry.modified or 0.0 for entry in self._store.list_objects(self._all)}
        now = found[self._root + _PROBE_FILE]  # by the store's clock, like the others
        self._delete_objects(
            [key for key, modified in found.items() if modified < now - _STALE_SECONDS]
        )

    def _record_mirrored(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._there.update(keys)

    def _delete_objects(self, keys: list[str]) -> None:
        map_in_threads(self._store.delete, keys, _PARALLEL_REQUESTS)

    def _mirror_key(self, path: Path) -> str:
        return self._root + path.relative_to(self._workdir).as_posix()

    def _s3a_address(self, key: str) -> str:
        return "s3a" + self._store.uri(key).removeprefix("s3")


def open_staging(
    sessions: SparkSessions, spec: PipelineSpec, store: Store, workdir: Path
) -> Staging:
    """The staging that the spec asks for, proven to work with this Spark, for all of its sessions.

    If tasks run on this host, it is the disk, unproven. Else it starts Spark; for a bucket it sets
    S3A in both sessions.

    Raises:
        ConfigurationError: tasks do not see the scratch folder, or cannot read the bucket, or the
            store is not in S3.
        TransientError: the store does not answer, or Spark lost its executors.
    """
    if runs_on_one_host(spec.spark):
        return Staging()
    if spec.spark.staging == "disk":
        _require_shared_disk(sessions.full, spec, workdir)
        return Staging()
    if not store.url.startswith("s3://"):
        raise STAGING_NEEDS_S3(pipeline=spec.name, url=store.url)
    _require_s3a(sessions.full, spec)
    settings = S3Settings.from_environment("")
    build = build_executor_s3a_settings if _have_own_keys(sessions, spec) else build_s3a_settings
    for key, value in build(settings).items():
        for session in (sessions.full, sessions.quick):
            session.conf.set(key, value)
    staging = BucketStaging(store, spec.name, workdir)
    try:
        staging.verify_access(sessions.full)
    except SPARK_ERRORS as error:
        raise staging.find_outage() or BUCKET_UNREADABLE(
            pipeline=spec.name, cause=extract_cause(error)
        ) from error
    return staging


def build_s3a_settings(settings: S3Settings) -> dict[str, str]:
    """The settings of a session with which Hadoop's S3A reaches the store's bucket.

    Without keys S3A looks where boto3 does: in the environment, for a web identity, in profiles,
    and for the role of a container or instance.
    """
    found = {"fs.s3a.endpoint.region": settings.region, "fs.s3a.path.style.access": "true"}
    if settings.endpoint:
        secure = str(settings.endpoint.startswith("https://")).lower()
        found |= {"fs.s3a.endpoint": settings.endpoint, "fs.s3a.connection.ssl.enabled": secure}
    access_key, secret_key, session_token = settings.reveal_keys()
    if not (access_key and secret_key):
        return {**found, _PROVIDER: _DEFAULT_PROVIDER}
    found |= {"fs.s3a.access.key": access_key, "fs.s3a.secret.key": secret_key}
    if not session_token:
        return {**found, _PROVIDER: _KEYS_PROVIDER}
    return {**found, "fs.s3a.session.token": session_token, _PROVIDER: _TOKEN_PROVIDER}


def build_executor_s3a_settings(settings: S3Settings) -> dict[str, str]:
    """As `build_s3a_settings`, where executors have keys of their own: no setting holds a key.

    Hadoop puts in the variables of the process that opens the bucket.
    """
    bare = settings.model_copy(update={"access_key": None})
    names = ("access.key", "secret.key", "session.token")
    keys = {
        f"fs.s3a.{name}": f"${{env.{own}:-${{env.{own.replace('EXECUTOR_', '')}:-}}}}"
        for name, own in zip(names, EXECUTOR_VARIABLES, strict=True)
    }
    # Each provider leaves it to the next one if its values are empty.
    providers = ",".join((_TOKEN_PROVIDER, _KEYS_PROVIDER, _DEFAULT_PROVIDER))
    return {**build_s3a_settings(bare), **keys, _PROVIDER: providers}


def _require_s3a(session: SparkSession, spec: PipelineSpec) -> None:
    """Refuse a Spark without S3A before the first job, which would wait for executors for ever.

    An executor whose jars cannot be loaded is not started, and Spark tries again without an end.
    The JVM of a server of Spark Connect cannot be asked. There the first read shows it.
    """
    if not hasattr(session, "sparkContext"):
        return
    context: Any = session.sparkContext
    hadoop = context._jsc.hadoopConfiguration()
    try:
        context._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass("s3a", hadoop)
    except SPARK_ERRORS as error:
        raise BUCKET_UNREADABLE(pipeline=spec.name, cause=extract_cause(error)) from error


def _have_own_keys(sessions: SparkSessions, spec: PipelineSpec) -> bool:
    try:
        return have_executors_keys(sessions.full)
    except SPARK_ERRORS as error:
        # Executors that were lost may have keys of their own.
        what = f"{spec.name}: the first tasks"
        lost = detect_lost_executors(what, error, pipeline=spec.name)
        if lost is not None:
            raise lost from error
        return False  # they run no Python, so tasks are left to Spark SQL, with the driver's keys


def _require_shared_disk(session: SparkSession, spec: PipelineSpec, folder: Path) -> None:
    probe = folder / _PROBE_FILE
    probe.write_text("seen\n", encoding="ascii")
    try:
        seen = session.read.text(str(probe)).count() == 1
    except SPARK_ERRORS:
        seen = False
    if not seen:
        raise NO_SHARED_DISK(pipeline=spec.name, folder=folder)
