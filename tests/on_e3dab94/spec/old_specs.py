"""What specs did in commit e3dab94, by its own names: each test says what should hold."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

from tidegate.errors import TidegateError
from tidegate.jobs.driver.errors import UNEXPECTED
from tidegate.jobs.sinks.errors import TABLE_MISFIT
from tidegate.jobs.spark.errors import SPARK_FAILED
from tidegate.jobs.spec.loader import parse_spec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.source_options import mask_secrets, mask_spec_lines
from tidegate.jobs.spec.spec_changes import LiveState, compare_specs

BASE: dict[str, Any] = {
    "name": "p",
    "sources": {
        "a": {
            "path": "in/a",
            "schema": {"t": "timestamp", "k": "string", "v": "long"},
            "event_time": "t",
            "lag": "1s",
        }
    },
    "windows": {
        "w": {"kind": "tumbling", "size": "1h", "keys": ["k"], "aggregates": {"s": "sum(v)"}}
    },
}
LEAKY = """\
apiVersion: tidegate/v1
name: leaky
sources:
  k:
    schema: {at: timestamp, v: long}
    event_time: at
    lag: 1m
    kind: kafka
    kafka:
      servers: b:9092
      topic: t
      options:
        security.protocol: SASL_SSL
        sasl.mechanism: PLAIN
        sasl.oauthbearer.token.endpoint.url: https://login.example/token
        sasl.password: hunter2-0
        ssl.keystore.key: "-----BEGIN PRIVATE KEY-----hunter2-1"
        basic.auth.user.info: "user:hunter2-2"
        session.timeout.ms: "6000"
outputs:
  catalog: https://catalog.example
  catalog_options:
    warehouse: s3://lake/tables
    header.Authorization: "Bearer hunter2-3"
    s3.session-token: hunter2-4
    adls.account-key: hunter2-5
    adls.sas-token.x: hunter2-6
    acme.thing: hunter2-7
sinks:
  pg: {kind: postgres, url: "postgresql://host/db?user=u&password=hunter2-8"}
  hook: {kind: webhook, url: "https://hooks.example/services/T000/hunter2-9"}
  hook2: {kind: webhook, url: "https://x.example/in?api_key=hunter2-10"}
  at:
    kind: postgres
    url: "postgresql://u:hunter2@hunter2-11@host/db"
spark:
  conf:
    spark.sql.shuffle.partitions: "8"
    spark.hadoop.fs.s3a.endpoint: http://minio:9000
    spark.hadoop.fs.azure.account.key.acct.dfs.core.windows.net: hunter2-12
    spark.hadoop.fs.s3a.secret.key: hunter2-13
    spark.ssl.keyPassword: hunter2-14
    spark.acme.apiKey: hunter2-15
    spark.acme.passphrase: hunter2-16
    spark.executorEnv.SOMETHING: hunter2-17
"""


def _edit(edit: Callable[[dict[str, Any]], object]) -> PipelineSpec:
    edited = copy.deepcopy(BASE)
    edit(edited)
    return PipelineSpec.model_validate(edited)


def _add_stream(spec: dict[str, Any], kind: str) -> None:
    spec["streams"] = {"totals": {"schema": {"k": "string", "total": kind}}}
    aggregates = {"total": "sum(v)"}
    reducer = {"from": "events", "to": "totals", "keys": ["k"], "aggregates": aggregates}
    spec["reducers"] = {"r": reducer}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (lambda s: None, lambda s: s["windows"]["w"]["aggregates"].update(s="avg(v)")),
        (lambda s: _add_stream(s, "double"), lambda s: _add_stream(s, "string")),
    ],
    ids=["an aggregate of another type", "a stream's column"],
)
def test_core_c9(
    old: Callable[[dict[str, Any]], object], new: Callable[[dict[str, Any]], object]
) -> None:
    """A column of a table has one type, without any other state; else no table takes the epochs."""
    found = compare_specs(_edit(old), _edit(new), LiveState())
    assert "refused" in [change.verdict.value for change in found]


def test_core_c24() -> None:
    """Errors that come back at each start say how to go on: the rows are sealed."""
    errors: list[TidegateError] = [
        SPARK_FAILED(pipeline="p", cause="ARITHMETIC_OVERFLOW"),
        TABLE_MISFIT(table="events", cause="a value"),
        UNEXPECTED(pipeline="p", kind="KeyError", text="k"),
    ]
    silent = [error.code for error in errors if "restore" not in str(error.advice)]
    assert silent == []


def test_ops_x3() -> None:
    """No kind of secret is readable on the page or in the bucket."""
    page = "\n".join(mask_spec_lines(LEAKY))
    bucket = mask_secrets(parse_spec(LEAKY)).canonical_json()
    assert re.findall(r"hunter2[\w-]*", page + bucket) == []
