"""A copy of a store is not the original.

Nothing writes for it until it has an identity and tables of its own.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from tests.sinks.conftest import World

from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import ProcessIdentity, ensure_identity, read_identity
from tidegate.errors import ConfigurationError
from tidegate.jobs.driver.housekeeping import maintain_bucket
from tidegate.jobs.sinks.iceberg_catalog import adopt_copied_store
from tidegate.jobs.sinks.lineage_position import read_published_cut


@pytest.fixture
def original(world: World) -> World:
    """Three epochs, published; no one drives."""
    world.seal(3, ("events", "late"))
    uid = ensure_identity(world.store, "p")
    world.sink(uid=uid).follow(world.log)
    Lease.acquire(world.store, "p", ProcessIdentity.this_process(), uid=uid).release()
    return world


def copy_of(original: World, tmp_path: Path) -> World:
    """Everything, catalog and all, in another place."""
    assert isinstance(original.store, LocalStore)
    shutil.copytree(original.store.root, tmp_path / "copy")
    return World(LocalStore(tmp_path / "copy"), tmp_path / "other-work", original.spec)


def contents(world: World) -> dict[str, str]:
    """What lies in a store, by name.

    SQLite folds its log into the catalog's file whenever a connection ends.
    """
    assert isinstance(world.store, LocalStore)
    root = world.store.root
    files = (
        path
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith("catalog.sqlite")
    )
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def test_nothing_writes_for_a_copy(original: World, tmp_path: Path) -> None:
    """The driver and maintenance refuse it, with both places named; looking is allowed."""
    copy = copy_of(original, tmp_path)
    for write in (
        lambda: ensure_identity(copy.store, "p"),
        lambda: maintain_bucket(copy.spec, copy.log),
    ):
        with pytest.raises(
            ConfigurationError, match=r"copy/p/identity.json is a copy of .*/p/identity.json"
        ) as said:
            write()
        assert "tidegate checkpoints adopt p" in str(said.value.advice)
    assert read_identity(copy.store, "p") == read_identity(original.store, "p")


def test_an_adopted_copy_does_not_affect_the_original(original: World, tmp_path: Path) -> None:
    """Its tables hold the same rows, at its own place, and go on.

    Not a byte of the original changes, and it goes on as well.
    """
    copy, before = copy_of(original, tmp_path), contents(original)
    uid = adopt_copied_store(copy.spec, copy.log)
    assert uid == ensure_identity(copy.store, "p") != read_identity(original.store, "p")
    sink = copy.sink(uid=uid)
    sink.follow(copy.log)
    copy.seal(2, ("events", "late"))
    sink.follow(copy.log)
    assert copy.exact(sink)
    current = read_published_cut(copy.store, "p")
    assert current is not None
    assert current.upto == 5
    assert all(place.startswith(copy.store.uri("p/iceberg/")) for place in current.tables.values())
    assert contents(original) == before
    Lease.acquire(copy.store, "p", ProcessIdentity.this_process(), uid=uid).release()

    original.seal(1, ("events", "late"))
    mine = original.sink(uid=ensure_identity(original.store, "p"))
    mine.follow(original.log)
    assert original.exact(mine)


def test_tables_of_a_shared_catalog_stay_the_originals(original: World, tmp_path: Path) -> None:
    """With the same catalog and namespace the copy's publisher is refused, where it would have
    taken the original's next slot.
    """
    assert isinstance(original.store, LocalStore)
    shared = original.spec.model_copy(
        update={
            "outputs": original.spec.outputs.model_copy(
                update={
                    "catalog": f"sqlite:///{original.store.root}/.tidegate-store/catalog.sqlite"
                }
            )
        }
    )
    copy = copy_of(original, tmp_path)
    copy.spec = shared
    uid = adopt_copied_store(shared, copy.log)
    copy.seal(1)
    with pytest.raises(ConfigurationError, match="belongs to another pipeline"):
        copy.sink(uid=uid).follow(copy.log)
    original.seal(1)
    mine = original.sink(uid=ensure_identity(original.store, "p"))
    mine.follow(original.log)
    assert original.exact(mine)


def test_what_cannot_be_adopted(original: World, tmp_path: Path) -> None:
    """The original itself.

    And a copy whose first epochs were retired, so that only the original's tables have their rows.
    """
    with pytest.raises(ConfigurationError, match="is not a copy"):
        adopt_copied_store(original.spec, original.log)
    copy = copy_of(original, tmp_path)
    copy.retire(1)
    with pytest.raises(ConfigurationError, match="epochs of p were retired"):
        adopt_copied_store(copy.spec, World(copy.store, tmp_path, copy.spec).log)
