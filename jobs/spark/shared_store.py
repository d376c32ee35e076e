"""Proves that the tasks of a cluster and the driver see the same folder, where the store is one."""

import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from pyspark.sql import SparkSession

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.jobs.spec.pipeline import PipelineSpec

from .errors import EXECUTORS_LOST, NO_SHARED_STORE
from .spark_session import SPARK_ERRORS, extract_cause, find_carried_error, runs_on_one_host
from .task_runner import choose_runner

_PROBES = 8
"""Tasks that write a file each: more than one, so that several hosts are asked."""


def require_shared_store(session: SparkSession, spec: PipelineSpec, store: Store) -> None:
    """Let tasks of a cluster write files into a store that is a folder, and read these.

    Raises:
        ConfigurationError: a task does not see the folder, or the driver not what the task wrote.
        TransientError: the tasks failed.
    """
    if runs_on_one_host(spec.spark) or not store.url.startswith("file://"):
        return
    folder = f"{BucketLayout(spec.name).staging_prefix}probe-{uuid4().hex}/"
    keys = [f"{folder}{number}" for number in range(_PROBES)]
    # A folder that a task finds was made by the driver: it does not make one of its own.
    store.put(f"{folder}driver", b"")
    try:
        paths = [store.uri(key) for key in keys]
        runner = choose_runner(session)
        try:
            answers = runner.run_small_job(session, write_probes, paths)
        except SPARK_ERRORS as error:
            what = f"{spec.name}: the first tasks"
            sign = extract_cause(error)
            carried = find_carried_error(error)
            if carried is None:
                carried = EXECUTORS_LOST(pipeline=spec.name, what=what, sign=sign)
            raise carried from error
        for path, host, failure in answers:
            cause = failure or _find_difference(store, keys[paths.index(path)], host)
            if cause is not None:
                raise NO_SHARED_STORE(pipeline=spec.name, url=store.url, host=host, cause=cause)
    finally:
        for key in (f"{folder}driver", *keys):
            store.delete(key)


def write_probes(paths: Iterable[str]) -> Iterator[tuple[str, str, str | None]]:
    """The body of a task: write the name of this host into files, and say how each went."""
    host = socket.gethostname()
    for path in paths:
        try:
            Path(path).write_text(host, "utf-8")
        except OSError as error:
            yield path, host, str(error)
        else:
            yield path, host, None


def _find_difference(store: Store, key: str, host: str) -> str | None:
    with suppress(NotFoundError):
        if store.get(key).data == host.encode():
            return None
    return "the driver does not see what it wrote there"
