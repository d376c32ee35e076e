"""`tidegate support-bundle`: everything a helper needs, no rows, no secrets."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from tests.cli.conftest import Cli

from tidegate.checkpoints.log import SlotLog
from tidegate.jobs.cli.support_bundle import Masker

PLANTED = ("hunter2-of-minio", "s3cr3t-in-the-url", "kafka-pass-phrase", "spark-conf-value", "bearer-0123456789")
KAFKA = """\
apiVersion: tidegate/v1
name: flights
sources:
  EWR:
    kind: kafka
    kafka:
      servers: broker:9092
      topic: t
      options: {sasl.jaas.config: "Login required password=kafka-pass-phrase;", ssl.key.password: "env:KEY_PASSWORD"}
    schema: {sched: timestamp, carrier: string}
    event_time: sched
    lag: 1h
outputs: {catalog: "postgresql://me:s3cr3t-in-the-url@db/catalog"}
spark: {conf: {spark.hadoop.fs.s3a.secret.key: spark-conf-value}}
"""


def bundle(cli: Cli, folder: Path) -> dict[str, str]:
    """Name -> text of every file in a fresh bundle."""
    said = cli("support-bundle", "flights.yaml", "--out", "b.zip")
    assert said.exit_code == 0, said.err
    with zipfile.ZipFile(folder / "b.zip") as files:
        return {name: files.read(name).decode() for name in files.namelist()}


def test_no_secret_gets_in(cli: Cli, log: SlotLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets of the environment, of the spec and of logs are masked, wherever they stand; what is no secret stays."""
    monkeypatch.setenv("TIDEGATE_S3_SECRET_KEY", "hunter2-of-minio")
    monkeypatch.setenv("TIDEGATE_S3_ENDPOINT", "http://minio:9000")
    monkeypatch.setenv("UNRELATED", "not-ours")
    (tmp_path / "flights.yaml").write_text(KAFKA)
    lines = [
        "connecting with hunter2-of-minio",
        "catalog postgresql://me:s3cr3t-in-the-url@db/catalog",
        'api_key="bearer-0123456789"',
    ]
    log.store.put(f"{log.layout.logs}a/driver.log", "\n".join(lines).encode())
    files = bundle(cli, tmp_path)
    whole = "\n".join(files.values())
    assert [secret for secret in PLANTED if secret in whole] == []
    assert "not-ours" not in whole
    assert json.loads(files["environment.json"])["TIDEGATE_S3_ENDPOINT"] == "http://minio:9000"
    assert "connecting with ***" in files["flights/logs/a/driver.log"]
    assert "env:KEY_PASSWORD" in files["spec.json"]


def test_what_is_in_it(cli: Cli, log: SlotLog, spec_file: Path, tmp_path: Path) -> None:
    """Versions, spec, the newest manifests and the documents of the bucket are there; no table file is."""
    files = bundle(cli, tmp_path)
    assert {"versions.json", "environment.json", "spec.json", "flights/identity.json"} <= set(files)
    assert sum(name.startswith("slots/") for name in files) == 3
    assert json.loads(files["slots/0000000003.json"])["counters"]["read"] == 30
    assert not [name for name in files if name.endswith(".parquet")]


def test_masker_leaves_words_alone() -> None:
    """A short secret is masked under its name only: as a word elsewhere it would tear holes into everything."""
    masker = Masker({"DB_PASSWORD": "test"})
    assert masker.text("the test of a test") == "the test of a test"
    assert masker.document({"password": "test", "count": 3, "lease_token": 7}) == {
        "password": "***",
        "count": 3,
        "lease_token": 7,
    }
