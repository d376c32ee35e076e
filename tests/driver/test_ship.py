"""The driver sends its own log."""

from __future__ import annotations

from pathlib import Path

from tidegate.checkpoints.driver_reports import list_log_attempts, read_log_tail
from tidegate.checkpoints.open_store import open_store
from tidegate.jobs.driver.log_output import ATTEMPT_VARIABLE, LOG_VARIABLE, ship_log


def test_the_last_words_are_sent(tmp_path: Path) -> None:
    """All lines that the log has when the driver ends are in the bucket.

    The launcher says where the log is.
    """
    url, file = str(tmp_path / "store"), tmp_path / "a.log"
    (tmp_path / "store").mkdir()
    with ship_log(url, "p", {LOG_VARIABLE: str(file), ATTEMPT_VARIABLE: "a"}):
        file.write_text("begun\nended\n")
    assert read_log_tail(open_store(url), "p", "a") == ["begun", "ended"]


def test_without_a_launcher_nothing_is_sent(tmp_path: Path) -> None:
    """A driver started by hand talks to its terminal."""
    url = str(tmp_path / "store")
    (tmp_path / "store").mkdir()
    with ship_log(url, "p", {}):
        pass
    assert list_log_attempts(open_store(url), "p") == []


def test_a_store_that_cannot_be_opened_harms_no_other_stream(tmp_path: Path) -> None:
    """The driver has other ways to say that its store is wrong."""
    with ship_log(
        "ftp://nowhere", "p", {LOG_VARIABLE: str(tmp_path / "none"), ATTEMPT_VARIABLE: "a"}
    ):
        pass
