"""A spec in the bucket holds no secret, and its options can be kept in the environment."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.checkpoint_specs import (
    compare_spec_with_checkpoint,
    read_spec,
    write_spec,
)
from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.source_options import mask_address, mask_spec_lines, resolve_address

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
  like: postgresql://me:hunter2-token:x@db/shop
open: [
"""
    lines = mask_spec_lines(text)
    assert "hunter2" not in "".join(lines)
    assert len(lines) == len(text.splitlines())
    assert lines[3] == 'b: {"ssl.key.password": env:KEY, token: ***'
    assert (lines[6], lines[10]) == ("  api_secret: ***", "  url: postgresql://me:***@db/shop")
    assert lines[11:] == [
        "  other: ${PGPASSWORD}",
        '  both: {url: "postgresql://me:***@db", token: ***',
        "  like: postgresql://me:***@db/shop",
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
    assert compare_spec_with_checkpoint(store, changed, epoch) == []
