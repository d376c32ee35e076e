"""Drivers' logs in pieces.

What grows is sent once, what is long keeps its beginning and its end.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints import driver_reports
from tidegate.checkpoints.driver_reports import (
    DriverLog,
    delete_old_logs,
    list_log_attempts,
    read_log_tail,
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_reports, "PIECE_BYTES", 10)
    monkeypatch.setattr(driver_reports, "MAX_PIECES", 4)


def _pieces(store: MemoryStore) -> dict[str, bytes]:
    return {
        entry.key.rpartition("/")[2][:6]: store.get(entry.key).data
        for entry in store.list_objects("p/logs/a/")
    }


def test_only_what_is_new_is_sent(tmp_path: Path) -> None:
    """Full pieces never change; the last one grows; nothing new costs nothing."""
    store, file = MemoryStore(), tmp_path / "log"
    log = DriverLog(store, "p", "a", file)
    assert log.send_new_pieces() == 0  # the file is not here yet
    file.write_text("0123456789abc")
    assert log.send_new_pieces() == 13
    assert log.send_new_pieces() == 0
    file.write_text("0123456789abcdef")
    assert log.send_new_pieces() == 6
    assert _pieces(store) == {"000000": b"0123456789", "000001": b"abcdef"}


@pytest.mark.parametrize("step", [5, 10, 37, 95])
def test_a_long_log_keeps_its_beginning_and_its_end(tmp_path: Path, step: int) -> None:
    """However it grew, the same four pieces are left in the end."""
    store, file = MemoryStore(), tmp_path / "log"
    log, text = (
        DriverLog(store, "p", "a", file),
        b"".join(b"line %03d\n\n" % n for n in range(10))[:95],
    )
    for end in range(step, len(text) + step, step):
        file.write_bytes(text[:end])
        log.send_new_pieces()
    assert sorted(_pieces(store)) == ["000000", "000007", "000008", "000009"]
    assert _pieces(store)["000009"] == text[90:]


def test_the_rest_of_a_killed_driver_s_log_is_sent_by_another(tmp_path: Path) -> None:
    """Whoever finds the file sends all of it again; the pieces are the same."""
    store, file = MemoryStore(), tmp_path / "log"
    file.write_text("0123456789a")
    DriverLog(store, "p", "a", file).send_new_pieces()
    file.write_text("0123456789abcdefghijkl")
    DriverLog(store, "p", "a", file).send_new_pieces()
    assert b"".join(_pieces(store).values()) == b"0123456789abcdefghijkl"


def test_the_tail_and_the_list(tmp_path: Path) -> None:
    """The newest attempt comes first; the tail reads the newest pieces only; old attempts go."""
    store, file = MemoryStore(), tmp_path / "log"
    file.write_text("\n".join(f"l{n}" for n in range(20)))
    for attempt in ("20260101T1-a", "20260102T1-b", "20260103T1-c"):
        DriverLog(store, "p", attempt, file).send_new_pieces()
    assert list_log_attempts(store, "p") == ["20260103T1-c", "20260102T1-b", "20260101T1-a"]
    assert read_log_tail(store, "p", "20260103T1-c", 2) == ["l18", "l19"]
    assert delete_old_logs(store, "p", keep=2) == ["20260101T1-a"]
    assert len(list_log_attempts(store, "p")) == 2
    assert read_log_tail(store, "p", "20260101T1-a") == []
