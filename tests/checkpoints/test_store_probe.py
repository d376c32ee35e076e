"""The races of the start-up probe: a server that lets two writers win is refused."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints import store_probe
from tidegate.checkpoints.s3_store import S3Settings, S3Store
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
    assert run_write_races(JudgesEarly()) == [
        "one_create_wins_of_64_bytes",
        "one_create_wins_of_1048577_bytes",
    ]


def test_a_store_that_fails_with_large_bodies_only_loses_the_race() -> None:
    """Servers store small bodies in another way."""
    assert run_write_races(JudgesEarly(1 << 20)) == ["one_create_wins_of_1048577_bytes"]


def test_only_a_swap_that_two_writers_win_is_named() -> None:
    """Creation is honest here."""

    class SwapsEarly(JudgesEarly):
        def create(self, key: str, data: bytes) -> str:
            return MemoryStore.create(self, key, data)

    assert run_write_races(SwapsEarly(1 << 20)) == ["one_swap_wins_of_1048577_bytes"]


def test_a_race_without_an_answer_is_no_verdict() -> None:
    """The driver tries again: the outcome is unknown, and says nothing against the store."""

    class Silent(MemoryStore):
        def create(self, key: str, data: bytes) -> str:
            raise OutcomeUnknownError("no answer", code="x")

    with pytest.raises(OutcomeUnknownError):
        run_write_races(Silent())


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

    def race(store: Store) -> list[str]:
        """Note a race that the store wins."""
        races.append(store)
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
