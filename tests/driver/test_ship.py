"""The driver sends its own log."""

from __future__ import annotations

from pathlib import Path

from tidegate.checkpoints.driver_logs import attempts_of, tail_of
from tidegate.checkpoints.open import open_store
from tidegate.jobs.driver.ship import ATTEMPT, LOG, shipped_log


def test_the_last_words_are_sent(tmp_path: Path) -> None:
    """What stands in the log when the driver ends lies in the bucket; the launcher says where the log is."""
    url, file = str(tmp_path / "store"), tmp_path / "a.log"
    (tmp_path / "store").mkdir()
    with shipped_log(url, "p", {LOG: str(file), ATTEMPT: "a"}):
        file.write_text("begun\nended\n")
    assert tail_of(open_store(url), "p", "a") == ["begun", "ended"]


def test_without_a_launcher_nothing_is_sent(tmp_path: Path) -> None:
    """A driver started by hand talks to its terminal."""
    url = str(tmp_path / "store")
    (tmp_path / "store").mkdir()
    with shipped_log(url, "p", {}):
        pass
    assert attempts_of(open_store(url), "p") == []


def test_a_store_that_cannot_be_opened_harms_nobody(tmp_path: Path) -> None:
    """The driver has other ways to say that its store is wrong."""
    with shipped_log("ftp://nowhere", "p", {LOG: str(tmp_path / "none"), ATTEMPT: "a"}):
        pass
