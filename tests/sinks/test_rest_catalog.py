"""The tables over a real Iceberg REST catalog.

Followed, rewound, fought over, and caught up after it was away.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.catalog import load_catalog
from tests.servers.jars import ensure_jars
from tests.sinks.conftest import World, make_spec
from tests.sinks.rest_catalog import ARTIFACTS, RestCatalogServer
from tests.sinks.table_checks import is_table, once
from tests.sources.lakes import ME, Lake, rows

from tidegate.checkpoints.local_store import LocalStore
from tidegate.errors import TransientError
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.spec.pipeline import ReadLimits

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:unclosed <socket:ResourceWarning"
    ),  # py4j leaves them to the garbage collector
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestCatalogServer]:
    try:
        jars = ensure_jars("iceberg-rest", ARTIFACTS)
    except TransientError as error:
        pytest.skip(f"no registry with Iceberg's jars: {error.message}")
    found = RestCatalogServer(jars, tmp_path_factory.mktemp("rest"))
    found.start()
    yield found
    found.close()


@pytest.fixture
def rest(server: RestCatalogServer, tmp_path: Path) -> World:
    outputs = {"catalog": server.address, "namespace": f"ns_{secrets.token_hex(4)}"}
    return World(LocalStore(tmp_path / "store"), tmp_path / "work", make_spec(outputs=outputs))


def test_follow_restore_and_read(rest: World) -> None:
    """Epochs are published, rewound after a restore, and read, with group ends and their tags in
    between.
    """
    sink = rest.sink()
    target = rest.seal(12, ("events", "hourly")).id
    sink.follow(rest.log)
    rest.seal(2, ("events", "late"))
    sink.follow(rest.log)
    rest.fork(target)
    rest.seal(1)
    sink.follow(rest.log)
    assert rest.exact(sink)
    assert read_table(rest.spec, rest.store, "events")["_epoch"].to_pylist() == [
        n for n in range(1, 14) for _ in "12"
    ]


def test_race(rest: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two publishers, one overtaken between load and commit, nothing is published twice."""
    one, two = rest.sink(), rest.sink()
    rest.seal(2)
    one.follow(rest.log)
    two.follow(rest.log)
    rest.seal(1)
    once(monkeypatch, "append_slots", is_table("events"), lambda: two.follow(rest.log))
    one.follow(rest.log)
    assert rest.exact(one)
    assert rest.exact(two)


def test_catalog_is_away(rest: World, server: RestCatalogServer) -> None:
    """Epochs go on being sealed while the catalog is away; the tables catch up when it is back."""
    sink = rest.sink()
    rest.seal(2)
    sink.follow(rest.log)
    server.stop()
    rest.seal(2)
    with pytest.raises(TransientError, match="cannot be reached"):
        sink.follow(rest.log)
    server.start()
    assert sink.follow(rest.log) == 2
    assert rest.exact(sink)


def test_a_source_waits_for_its_catalog(server: RestCatalogServer, tmp_path: Path) -> None:
    """A source whose catalog is away is waited for, and the same source goes on where it was."""
    namespace = f"ns_{secrets.token_hex(4)}"
    lake = Lake(tmp_path, format="iceberg", name=f"{namespace}.t", catalog=server.address)
    with pytest.raises(TransientError, match="there is no iceberg table"):
        lake.read()
    catalog = load_catalog("writer", uri=server.address)
    catalog.create_namespace(namespace)
    table = catalog.create_table(f"{namespace}.t", rows(1).schema, location=lake.path.as_uri())
    table.append(rows(1))
    source = lake.source()
    resume = source.plan(ME, None, ReadLimits()).resume
    table.append(rows(2))
    server.stop()
    with pytest.raises(TransientError, match="cannot be reached"):
        source.plan(ME, resume, ReadLimits())
    server.start()
    assert [part["rows"] for part in source.plan(ME, resume, ReadLimits()).parts] == [1]
