"""Tasks on other hosts.

The scratch folder is on a disk that they see, or has a mirror in the bucket.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from pydantic import SecretStr
from pyspark.errors import PySparkException

from tests.servers.memory_store import MemoryBucket, MemoryStore
from tests.spark.agreement import spec_of
from tidegate.checkpoints.errors import STORE_UNAVAILABLE
from tidegate.checkpoints.s3_store import S3Settings
from tidegate.errors import ConfigurationError, TidegateError
from tidegate.jobs.spark.spark_session import SparkSessions
from tidegate.jobs.spark.staging import (
    BucketStaging,
    build_executor_s3a_settings,
    build_s3a_settings,
    open_staging,
)
from tidegate.jobs.spec.operations import add_connector_jars
from tidegate.jobs.spec.pipeline import PipelineSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(shutil.which("java") is None, reason="needs a JVM"),
]

DAY = 86_400.0


class Elsewhere:
    """A Spark whose hosts have another disk."""

    def __init__(self, session: SparkSession, there: Path) -> None:
        self._session, self._there = session, there

    @property
    def read(self) -> Elsewhere:
        return self

    def text(self, path: str) -> object:
        return self._session.read.text(str(self._there / Path(path).name))


class Anywhere:
    """A Spark that reads every address."""

    read = property(lambda self: self)

    def text(self, _path: str) -> Anywhere:
        return self

    def collect(self) -> list[Any]:
        return []


class Aging(MemoryStore):
    """A store whose clock can be set."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__(MemoryBucket())
        self.uploads = 0
        self._written: dict[str, float] = {}

    def put(self, key: str, data: bytes) -> str:
        self._written[key] = self.now
        return super().put(key, data)

    def upload(self, path: Path, key: str) -> Any:
        self.uploads += 1
        self._written[key] = self.now
        return super().upload(path, key)

    def list_objects(self, prefix: str, **more: Any) -> Any:
        for entry in super().list_objects(prefix, **more):
            yield type(entry)(entry.key, entry.size, entry.etag, self._written[entry.key])


def far(**spark: str) -> PipelineSpec:
    """A pipeline whose Spark is elsewhere."""
    spec = spec_of()
    return spec.model_copy(
        update={"spark": spec.spark.model_copy(update={"master": "spark://far:7077", **spark})}
    )


def test_a_spark_without_the_scratch_folder_is_refused(
    session: SparkSession, tmp_path: Path
) -> None:
    """It says what to share.

    A cluster that sees the folder goes on, and a local Spark is not asked.
    """
    store = Aging()
    open_staging(SparkSessions(lambda: session), far(), store, tmp_path)
    blind: SparkSession = Elsewhere(session, tmp_path / "there")  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="does not see the driver's scratch folder"):
        open_staging(SparkSessions(lambda: blind), far(), store, tmp_path)
    open_staging(SparkSessions(lambda: blind), spec_of(), store, tmp_path)


def test_the_bucket_needs_a_bucket(session: SparkSession, tmp_path: Path) -> None:
    """A store that is a folder cannot be what tasks elsewhere read from."""
    with pytest.raises(ConfigurationError, match="needs a store in S3"):
        open_staging(SparkSessions(lambda: session), far(staging="bucket"), Aging(), tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Python worker exited unexpectedly (crashed)", "spark.executors_lost"),
        ('Cannot run program "python3"', "spark.no_bucket"),
    ],
)
def test_lost_executors_do_not_get_the_drivers_keys(
    tmp_path: Path, words: str, expected: str
) -> None:
    """They may have their own; only hosts without Python get those of the driver."""
    session: Any = Mock()
    context = session.sparkContext
    context.master, context.defaultParallelism = "spark://far:7077", 1
    context.parallelize.side_effect = PySparkException(words)
    session.read.text.side_effect = PySparkException("no such host")
    store = Aging()
    store.url = "s3://b"
    with pytest.raises(TidegateError) as failed:
        open_staging(SparkSessions(lambda: session), far(staging="bucket"), store, tmp_path)
    assert failed.value.code == expected
    assert session.conf.set.called == (expected == "spark.no_bucket")


def test_a_file_is_uploaded_once_and_goes_with_its_folder(tmp_path: Path) -> None:
    """A file is shown as often as it is asked for.

    What the store has anyway is not uploaded at all.
    """
    store, workdir = Aging(), tmp_path / "driver"
    staging = BucketStaging(store, "p", workdir)
    for folder in ("epoch-1", "epoch-2"):
        (workdir / folder).mkdir(parents=True)
        (workdir / folder / "rows.parquet").write_bytes(b"rows")
    first = staging.expose_file(workdir / "epoch-1" / "rows.parquet")
    assert staging.expose_file(workdir / "epoch-1" / "rows.parquet") == first
    staging.expose_file(workdir / "epoch-2" / "rows.parquet")
    assert staging.expose_file(
        workdir / "epoch-2" / "segment.parquet", key="p/state/segment.parquet"
    ).endswith("p/state/segment.parquet")
    assert store.uploads == 2
    staging.discard(workdir / "epoch-1")
    assert [entry.key for entry in store.list_objects("p/staging/")] == [
        "p/staging/driver/epoch-2/rows.parquet"
    ]
    staging.expose_file(workdir / "epoch-1" / "rows.parquet")
    assert store.uploads == 3
    staging.discard(workdir)
    assert list(store.list_objects("p/staging/")) == []


def test_what_a_dead_driver_left_goes_after_a_day(tmp_path: Path) -> None:
    """By the store's clock; what may belong to a driver that still runs stays."""
    store = Aging()
    store.put("p/staging/dead/rows.parquet", b"rows")
    store.now = DAY
    store.put("p/staging/other/rows.parquet", b"rows")
    store.now = 1.5 * DAY
    everything: SparkSession = Anywhere()  # type: ignore[assignment]
    BucketStaging(store, "p", tmp_path / "driver").verify_access(everything)
    assert [entry.key for entry in store.list_objects("p/")] == [
        "p/staging/driver/probe.txt",
        "p/staging/other/rows.parquet",
    ]


def test_an_outage_of_the_store_is_not_blamed_on_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks fail when the store is away, and the driver asks it why.

    A store that is away loses no epoch by not being tidied.
    """
    store = Aging()
    staging = BucketStaging(store, "p", tmp_path)
    assert staging.find_outage() is None
    away: Exception = STORE_UNAVAILABLE(uri="s3://b/p", cause="refused")

    def refuse(*_: Any, **__: Any) -> Any:
        raise away

    monkeypatch.setattr(store, "stat", refuse)
    monkeypatch.setattr(store, "list_objects", refuse)
    assert staging.find_outage() is away
    staging.discard(tmp_path)


def test_s3a_gets_the_settings_of_the_store() -> None:
    """Endpoint, region and keys; without keys S3A looks for them itself."""
    given = S3Settings(bucket="b", endpoint="https://minio.example.org", region="eu-west-1")
    without = build_s3a_settings(given)
    assert "fs.s3a.access.key" not in without
    # Of the SDK: it reads profiles and tokens of a web identity too.
    assert without["fs.s3a.aws.credentials.provider"].endswith(".DefaultCredentialsProvider")
    found = build_s3a_settings(
        S3Settings.model_validate({**given.model_dump(), "access_key": "who", "secret_key": "what"})
    )
    assert found["fs.s3a.endpoint"] == "https://minio.example.org"
    assert found["fs.s3a.connection.ssl.enabled"] == "true"
    assert (found["fs.s3a.access.key"], found["fs.s3a.secret.key"]) == ("who", "what")


def test_s3a_gets_a_session_token() -> None:
    """Then another provider takes the keys."""
    found = build_s3a_settings(
        S3Settings.from_environment(
            "b",
            environment={
                f"TIDEGATE_S3_{name}": name
                for name in ("ACCESS_KEY", "SECRET_KEY", "SESSION_TOKEN")
            },
        )
    )
    assert found["fs.s3a.session.token"] == "SESSION_TOKEN"
    assert found["fs.s3a.aws.credentials.provider"].endswith(".TemporaryAWSCredentialsProvider")


def test_s3a_of_executors_with_keys_is_given_none(session: SparkSession) -> None:
    """Hadoop reads them in each process: the executor's, else those of the driver, else none."""
    keys = {"access_key": "who", "secret_key": SecretStr("what"), "session_token": SecretStr("t")}
    found = build_executor_s3a_settings(S3Settings.model_validate({"bucket": "b", **keys}))
    assert not {"who", "what", "t"} & set(found.values())
    jvm: Any = session.sparkContext._jvm
    conf = jvm.org.apache.hadoop.conf.Configuration(False)
    given = found["fs.s3a.access.key"]
    unset = "TIDEGATE_TEST_UNSET"
    for own, driver, expected in (
        ("PATH", "HOME", "PATH"),
        (unset, "HOME", "HOME"),
        (unset, unset, ""),
    ):
        named = given.replace("TIDEGATE_EXECUTOR_S3_ACCESS_KEY", own)
        conf.set("key", named.replace("TIDEGATE_S3_ACCESS_KEY", driver))
        assert conf.get("key") == (jvm.System.getenv(expected) if expected else "")


def test_the_jars_come_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hadoop's S3A without the SDK's bundle; jars that are named replace it."""
    monkeypatch.delenv("TIDEGATE_SPARK_JARS", raising=False)
    conf = add_connector_jars(far(staging="bucket")).conf
    assert "hadoop-aws" in conf["spark.jars.packages"]
    assert "software.amazon.awssdk:bundle" in conf["spark.jars.excludes"]
    assert "spark.jars.packages" not in add_connector_jars(far()).conf
    monkeypatch.setenv("TIDEGATE_SPARK_JARS", "/jars/a.jar")
    assert add_connector_jars(far(staging="bucket")).conf == {"spark.jars": "/jars/a.jar"}
