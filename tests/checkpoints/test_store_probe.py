"""The races of the start-up probe: servers that let two writers win are refused."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from pydantic import SecretStr
from tests.servers.memory_store import MemoryStore
from tests.servers.minio import CertifiedMinio, RealMinio
from tests.servers.s3_nodes import HastyNodes, relaying, resolve_to

from tidegate.checkpoints import store_probe
from tidegate.checkpoints.s3_store import S3Settings, S3Store
from tidegate.checkpoints.server_addresses import ServerAddress
from tidegate.checkpoints.store import OutcomeUnknownError, Store, StoredObject
from tidegate.checkpoints.store_probe import (
    probe_store,
    require_atomic_writes,
    run_write_races,
)
from tidegate.errors import ConfigurationError

_RACERS = 8


class JudgesEarly(MemoryStore):
    """Judges each condition before it has read the body, as some servers did: all racers win."""

    def __init__(self, smallest: int = 0) -> None:
        super().__init__()
        self._smallest = smallest  # bytes of the bodies that it judges early
        self._judged = threading.Barrier(_RACERS)
        self._write = threading.Lock()

    def create(self, key: str, data: bytes) -> str:
        return self._judge_early(key, data, super().create, free=self.stat(key) is None)

    def compare_and_swap(self, key: str, data: bytes, etag: str) -> str:
        found = self.stat(key)
        free = found is not None and found.etag == etag
        return self._judge_early(
            key,
            data,
            lambda key, data: super(JudgesEarly, self).compare_and_swap(key, data, etag),
            free=free,
        )

    def _judge_early(
        self, key: str, data: bytes, honest: Callable[[str, bytes], str], *, free: bool
    ) -> str:
        raced = key.startswith("tidegate-probe/") and data[:7] == b"0" * 7
        if not raced or len(data) < self._smallest:
            return honest(key, data)
        self._judged.wait()
        with self._write:
            if not free:
                return honest(key, data)
            return self.put(key, data)


def test_a_store_that_judges_conditions_early_loses_the_race() -> None:
    """The sequential probe finds nothing; the races find each promise, small bodies and large."""
    assert probe_store(JudgesEarly()) == []
    assert run_write_races([JudgesEarly()]) == [
        "one_create_wins_of_64_bytes",
        "one_create_wins_of_1048577_bytes",
    ]


def test_a_store_that_fails_with_large_bodies_only_loses_the_race() -> None:
    """Servers store small bodies in another way."""
    assert run_write_races([JudgesEarly(1 << 20)]) == ["one_create_wins_of_1048577_bytes"]


def test_only_a_swap_that_two_writers_win_is_named() -> None:
    """Creation is honest here."""

    class SwapsEarly(JudgesEarly):
        def create(self, key: str, data: bytes) -> str:
            return MemoryStore.create(self, key, data)

    assert run_write_races([SwapsEarly(1 << 20)]) == ["one_swap_wins_of_1048577_bytes"]


def test_a_race_without_an_answer_is_no_verdict() -> None:
    """The driver tries again: the outcome is unknown, and says nothing against the store."""

    class Silent(MemoryStore):
        def create(self, key: str, data: bytes) -> str:
            raise OutcomeUnknownError("no answer", code="x")

    with pytest.raises(OutcomeUnknownError):
        run_write_races([Silent()])


class Bucket(S3Store):
    """A bucket of S3 whose objects are in memory; an ETag of its own names what was written."""

    def __init__(self) -> None:
        super().__init__(S3Settings(bucket="b", endpoint="http://127.0.0.1:1"))
        self.objects = MemoryStore()
        for name in ("put", "create", "compare_and_swap", "delete", "stat"):
            setattr(self, name, getattr(self.objects, name))

    def get(self, key: str) -> StoredObject:
        return replace(self.objects.get(key), age=3.0)


def test_writers_are_raced_once_a_week(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's start costs one request more, until the verdict is a week old."""
    bucket = Bucket()
    races: list[Store] = []

    def race(stores: Sequence[Store]) -> list[str]:
        """Note a race that the store wins."""
        races.extend(stores)
        return []

    monkeypatch.setattr(store_probe, "run_write_races", race)
    for _ in range(3):
        require_atomic_writes(bucket)
    assert len(races) == 1
    monkeypatch.setattr(store_probe, "_VERDICT_AGE", 2.0)
    require_atomic_writes(bucket)
    assert len(races) == 2


def test_a_server_that_lost_a_race_is_refused_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict is kept, and the error names the promise."""
    bucket = Bucket()
    monkeypatch.setattr(store_probe, "run_write_races", lambda _: ["one_create_wins"])
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="one_create_wins"):
            require_atomic_writes(bucket)


_NAME = "store.test"
_ADDRESSES = ["127.0.0.1", "127.0.0.2"]


def open_nodes(nodes: HastyNodes, *others: str) -> S3Store:
    """A driver's store, by the name of the servers."""
    secret = SecretStr("secret")
    return S3Store(
        S3Settings(
            bucket="bucket",
            endpoint=f"http://{_NAME}:{nodes.port}",
            other_endpoints=others,
            access_key="key",
            secret_key=secret,
            connect_timeout=60.0,  # the machine may be busy
            read_timeout=60.0,
        )
    )


def test_servers_that_lose_a_race_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address of the name gets its writers. Each server alone wins."""
    addresses = ["127.0.0.1"]
    resolve_to(monkeypatch, _NAME, addresses)
    for alone in _ADDRESSES:
        addresses[:] = [alone]
        with HastyNodes([alone]).serving() as nodes:
            require_atomic_writes(open_nodes(nodes))
            assert set(nodes.requests) == {alone}
    addresses[:] = _ADDRESSES
    with HastyNodes(_ADDRESSES).serving() as nodes:
        with pytest.raises(ConfigurationError, match="one_create_wins_of_64_bytes"):
            require_atomic_writes(open_nodes(nodes))
        assert nodes.requests == {"127.0.0.1": 8, "127.0.0.2": 8}  # of two sizes of bodies
        assert nodes.hosts == {f"{_NAME}:{nodes.port}"}


def test_other_endpoints_of_the_store_are_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other drivers use another name."""
    resolve_to(monkeypatch, _NAME, ["127.0.0.1"])
    with HastyNodes(_ADDRESSES).serving() as nodes:
        other = f"http://127.0.0.2:{nodes.port}"
        with pytest.raises(ConfigurationError, match="one_create_wins_of_64_bytes"):
            require_atomic_writes(open_nodes(nodes, other))


def test_a_new_address_is_raced_when_it_accepts_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The verdict of this week is about other servers. One that is down has broken nothing."""
    addresses = ["127.0.0.1", "127.0.0.3"]
    resolve_to(monkeypatch, _NAME, addresses)
    with HastyNodes(["127.0.0.1"]).serving() as nodes:
        store = open_nodes(nodes)
        require_atomic_writes(store)
        raced = nodes.requests.total()
        require_atomic_writes(store)
        assert nodes.requests.total() == raced
        with relaying("127.0.0.3", nodes.port) as sizes:
            require_atomic_writes(store)
        assert nodes.requests.total() == 2 * raced
        assert sum(sizes) > 1 << 20


@pytest.mark.minio
def test_minio_wins_by_two_addresses_of_a_name(
    real_minio: RealMinio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signature has the name, whichever address a writer is pinned to."""
    resolve_to(monkeypatch, _NAME, _ADDRESSES)
    port = real_minio.server.port
    named = {"endpoint": f"http://{_NAME}:{port}", "prefix": "raced-by-name"}
    with relaying("127.0.0.2", port) as sizes:
        require_atomic_writes(S3Store(real_minio.settings().model_copy(update=named)))
        assert (
            sum(sizes) > 16 * 500
        )  # of 32 writes half; MinIO refuses most of them by their headers


@pytest.mark.minio
def test_a_pinned_client_verifies_the_name_of_the_endpoint(
    tls_minio: CertifiedMinio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is of 127.0.0.1, and the connection goes to another address."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tls_minio.ca))
    with relaying("127.0.0.2", tls_minio.server.port) as sizes:
        store = S3Store(tls_minio.settings("pinned"), address="127.0.0.2")
        store.put("one", b"1")
        assert store.get("one").data == b"1"
        store.close()
        assert sum(sizes) > 0


def test_addresses_of_aws_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They change all the time, and each start would race the new ones."""
    bucket, asked = Bucket(), list[str]()

    def note_endpoints(endpoints: Sequence[str]) -> list[ServerAddress]:
        asked.extend(endpoints)
        return []

    aws = "https://s3.eu-west-1.amazonaws.com"
    bucket.settings = S3Settings(bucket="b", endpoint=aws, other_endpoints=("http://other",))
    monkeypatch.setattr(store_probe, "run_write_races", lambda _: [])
    monkeypatch.setattr(store_probe, "resolve_endpoints", note_endpoints)
    require_atomic_writes(bucket)
    assert asked == ["http://other"]
