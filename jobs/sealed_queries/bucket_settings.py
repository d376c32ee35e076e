"""The settings with which Spark keeps checkpoints in the bucket, through Hadoop's S3A."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from tidegate.checkpoints.s3_store import S3Settings
from tidegate.jobs.spark.staging import build_s3a_settings
from tidegate.jobs.spec.operations import S3A, S3A_EXCLUDES, build_jar_settings

_JAR_LISTS: Final = ("spark.jars", "spark.jars.packages", "spark.jars.excludes")
_STREAMING: Final = "spark.sql.streaming"
_SETTINGS: Final = {
    # A checksum file per file doubles the requests; S3 and its clients check the bytes themselves.
    f"{_STREAMING}.checkpoint.fileChecksum.enabled": "false",
    # Each batch is listed and sealed at once, and Spark's default of 100 makes long lists.
    f"{_STREAMING}.minBatchesToRetain": "20",
}


def add_bucket_jars(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that add the jars of S3A to those of a script.

    Empty if the script names hadoop-aws itself, or has these jars already.
    """
    given = {key: str(options.get(key) or "") for key in _JAR_LISTS}
    if any("hadoop-aws" in jars for jars in given.values()):
        return {}
    ours = build_jar_settings(S3A, S3A_EXCLUDES)
    return {key: ",".join(filter(None, (given[key], jars))) for key, jars in ours.items()}


def set_bucket_access(session: Any, address: str, own: Mapping[str, str]) -> None:
    """Let queries that start in a session from now on keep their checkpoints at an address.

    S3A's settings are those of this bucket alone: the script may use other buckets in another way.
    They reach Spark as settings of the session, never as arguments of a process.

    Args:
        session: PySpark's.
        address: ``s3a://bucket/...``.
        own: settings of the job, which win.
    """
    bucket = urlsplit(address).netloc
    access = build_s3a_settings(S3Settings.from_environment(bucket))
    here = {
        key.replace("fs.s3a.", f"fs.s3a.bucket.{bucket}.", 1): value
        for key, value in access.items()
    }
    for key, value in {**here, **_SETTINGS}.items():
        if key not in own:
            session.conf.set(key, value)
