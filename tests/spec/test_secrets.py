"""A spec in the bucket holds no secret, and its options can be kept in the environment."""

from __future__ import annotations

import copy
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.checkpoint_specs import (
    SealedSpecs,
    read_spec,
    write_spec,
)
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.cli.support_bundle import SecretMasker
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.loader import parse_spec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.source_options import resolve_address
from tidegate.jobs.spec.spec_masks import mask_secrets, mask_spec_lines
from tidegate.secret_masks import mask_address

KAFKA = {"sasl.jaas.config": 'Login required password="hunter2";', "ssl.key.password": "env:KEY"}
BASE: dict[str, Any] = {
    "name": "p",
    "sources": {
        "one": {
            "kind": "kafka",
            "kafka": {"servers": "b:9092", "topic": "t", "options": KAFKA},
            "schema": {"at": "timestamp"},
            "event_time": "at",
            "lag": "1m",
        }
    },
    "outputs": {"catalog": "postgresql://me:hunter2@db/catalog"},
    "sinks": {"w": {"kind": "postgres", "url": "postgresql://me:${PGPASSWORD}@db/shop"}},
    "spark": {"conf": {"spark.hadoop.fs.s3a.secret.key": "hunter2"}},
}


def test_a_spec_lies_in_the_bucket_without_its_secrets() -> None:
    """Literal passwords are masked; references to the environment stay, and so does the digest."""
    store, spec = MemoryStore(), PipelineSpec.model_validate(BASE)
    write_spec(store, spec)
    (entry,) = store.list_objects("p/specs/")
    text = store.get(entry.key).data.decode()
    assert spec.digest() in entry.key
    assert "hunter2" not in text
    assert "postgresql://me:***@db/catalog" in text
    assert "${PGPASSWORD}" in text
    assert "env:KEY" in text
    kept = read_spec(store, "p", spec.digest())
    assert kept is not None
    assert kept.outputs.catalog == mask_address(str(spec.outputs.catalog))


def test_a_spec_is_shown_without_its_secrets() -> None:
    """Its text, with each line in its place: also flow style, escapes, blocks, and broken YAML."""
    text = r"""
name: p
a: {password: hunter2, next: hunter2}
b: {"ssl.key.password": env:KEY, token: "hunter2\" hunter2"}
options:
  sasl.jaas.config: Login password="hunter2";
  api_secret: |
    hunter2

    hunter2
  url: postgresql://me:hunter2@db/shop
  other: ${PGPASSWORD}
  both: {url: "postgresql://me:hunter2@db", token: hunter2}
  catalog: postgresql://me:hunter2-token:x@db/shop
open: [
"""
    lines = mask_spec_lines(text)
    assert "hunter2" not in "".join(lines)
    assert len(lines) == len(text.splitlines())
    assert lines[3] == 'b: {"ssl.key.password": env:KEY, token: ***'
    assert (lines[6], lines[10]) == ("  api_secret: ***", "  url: postgresql://me:***@db/shop")
    assert lines[11:] == [
        "  other: ${PGPASSWORD}",
        "  both: ***",
        "  catalog: postgresql://me:***@db/shop",
        "open: [",
    ]


def test_a_damaged_spec_counts_as_not_stored() -> None:
    """It is None, as one that is not there."""
    store, spec = MemoryStore(), PipelineSpec.model_validate(BASE)
    write_spec(store, spec)
    (entry,) = store.list_objects("p/specs/")
    store.put(entry.key, b'{"apiVersion')
    assert read_spec(store, "p", spec.digest()) is None


def test_names_that_users_choose_are_not_secrets() -> None:
    """Columns, also of headers and renamed ones, may be named like secrets; the spec is kept."""
    data = copy.deepcopy(BASE)
    one = data["sources"]["one"]
    one["schema"] |= {"session_token": "string", "login": "timestamp"}
    one["kafka"]["headers"] = {"session_token": "x-session"}
    one["evolution"] = {"renamed": {"old_token": "session_token"}}
    del data["spark"], one["kafka"]["options"]
    store, spec = MemoryStore(), PipelineSpec.model_validate(data)
    write_spec(store, spec)
    kept = read_spec(store, "p", spec.digest())
    assert kept is not None
    assert kept.sources == spec.sources


def test_an_address_takes_its_password_from_the_environment() -> None:
    """A variable that is not set is a configuration error that names option and variable."""
    address = "postgresql://me:${CATALOG_PASSWORD}@db/catalog"
    known = {"CATALOG_PASSWORD": "hunter2"}
    assert resolve_address("outputs.catalog", address, known) == (
        "postgresql://me:hunter2@db/catalog"
    )
    with pytest.raises(ConfigurationError, match="CATALOG_PASSWORD"):
        resolve_address("outputs.catalog", address, {})


def test_a_rotated_password_is_no_change_of_the_spec() -> None:
    """Neither is the mask in the kept spec: only what the secrets belong to is compared."""
    store, spec = MemoryStore(), PipelineSpec.model_validate(BASE)
    write_spec(store, spec)
    epoch: Any = SimpleNamespace(
        spec_digest=spec.digest(),
        segments=(),
        counters=SimpleNamespace(retained=0),
        frontier_after=0,
    )
    rotated = {**BASE, "outputs": {"catalog": "postgresql://me:hunter3@db/catalog"}}
    changed = PipelineSpec.model_validate(rotated)
    assert changed.digest() != spec.digest()
    assert SealedSpecs(SlotLog(store, spec.name)).compare_with(changed, epoch) == []


# Every secret of this spec contains the mark, also one that is a part of an address.
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
SHOWN = (
    "SASL_SSL",
    "https://login.example/token",
    "s3://lake/tables",
    "http://minio:9000",
    "postgresql://host/db?user=u&password=***",
    "https://hooks.example/***",
)


def test_no_kind_of_secret_is_readable_on_any_surface() -> None:
    """On the page, in the bucket and in a support bundle; harmless options stay readable."""
    page = "\n".join(mask_spec_lines(LEAKY))
    bucket = mask_secrets(parse_spec(LEAKY)).canonical_json()
    bundle = json.dumps(SecretMasker({}).mask_document(json.loads(bucket)))
    for surface in (page, bucket, bundle):
        assert re.findall(r"hunter2[\w-]*", surface) == []
    for text in SHOWN:
        assert text in page
        assert text in bucket
    assert len(page.splitlines()) == len(LEAKY.splitlines())


HEAD = """\
apiVersion: tidegate/v1
name: p
sources:
  one: {path: in, schema: {at: timestamp}, event_time: at, lag: 1m}
"""


@pytest.mark.parametrize(
    "mistake",
    [
        "sinks: {pg: {kind: postgres, url: 'mysql://u:271828182@host/db'}}",
        "sinks: {k: {kind: kafka, servers: b, topic: t, options: {sasl.password: 271828182}}}",
        "sinks: {k: {kind: kafka, servers: b, topic: t, options: {acme.pin: [271828182]}}}",
        "outputs: {catalog: 'http://c', catalog_options: {credential: 271828182}}",
        "spark: {conf: {spark.acme.passphrase: 271828182}}",
    ],
)
def test_a_mistake_beside_a_secret_does_not_show_it(mistake: str) -> None:
    """The error names field and line, and is readable to everyone who sees the DAGs."""
    with pytest.raises(ConfigurationError) as refused:
        parse_spec(HEAD + mistake)
    assert "271828182" not in str(refused.value)


def test_an_error_shows_no_password_of_an_address() -> None:
    """Also where another system's text repeats the address that was used."""
    error = TransientError("no answer from postgresql://me:hunter2@db: down", code="x")
    assert str(error) == "no answer from postgresql://me:***@db: down"


def test_the_stored_spec_of_a_job_holds_no_secret() -> None:
    """Its settings and arguments are masked as the options of a pipeline are."""
    spec = JobSpec.model_validate(
        {
            "kind": "job",
            "name": "j",
            "app": "a.py",
            "args": ["--password", "hunter2", "--token=hunter2", "--day", "2026-01-01"],
            "conf": {
                "spark.hadoop.fs.s3a.secret.key": "hunter2",
                "spark.ssl.keyPassword": "env:PW",
            },
        }
    )
    masked = mask_secrets(spec)
    assert masked.args == ("--password", "***", "--token=***", "--day", "2026-01-01")
    assert set(masked.conf.values()) == {"***", "env:PW"}


def test_no_spec_takes_a_name_that_the_keys_of_another_pipeline_reach() -> None:
    """A batch run's keys belong to its pipeline, which may delete what lies below them."""
    with pytest.raises(ConfigurationError, match=r"<spec>:2: name: '__bf_' is reserved"):
        parse_spec(HEAD.replace("name: p", "name: p__bf_1a2b3c4d"))
