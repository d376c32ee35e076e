"""More applications, whose scripts do what scripts of strangers do."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any, ClassVar

from tests.sealed_queries.apps import SCRIPTS, Clicks
from tests.sealed_queries.clicks import read_files
from tidegate.checkpoints.manifest import Manifest

_CLOSERS = 3
"""Files behind the last minute. Two files may become one batch, so that one of them is not enough
for the watermark to pass it."""
_BAD_PRICE = "12,50"


class Packaged(Clicks):
    """Arguments, a package beside the script, a file in the current folder, and an own log."""

    name = "packaged"
    queries: ClassVar[tuple[str, ...]] = ("enriched",)

    def __init__(self, folder: Path, files: int) -> None:
        super().__init__(folder, files)
        module = folder / "more" / "sections.py"
        module.parent.mkdir()
        module.write_text('def find_section(page):\n    return page.split("/")[1]\n')
        settings = {"every": "1500 milliseconds", "module": str(module)}
        (folder / "settings.json").write_text(json.dumps(settings))

    @property
    def script(self) -> Path:
        return SCRIPTS / "packaged" / "main.py"

    def arguments(self) -> list[str]:
        return ["--source", str(self.folder / "in"), "--target", str(self.folder / "out")]

    def outputs(self) -> dict[str, Any]:
        log = (self.folder / "driver.log").read_text()
        return {
            "enriched": read_files(self.folder / "out"),
            "logs": "INFO every 1500 milliseconds" in log,
        }


class Timers(Clicks):
    """State that timers end, by `transformWithStateInPandas`."""

    name = "timers"
    queries: ClassVar[tuple[str, ...]] = ("enriched",)

    def __init__(self, folder: Path, files: int) -> None:
        super().__init__(folder, files)
        for number in range(_CLOSERS):
            click = {"at": f"2026-01-02T0{number}:00:00Z", "user": "u", "page": "/end"}
            path = folder / "in" / f"{files + number:05}.json"
            path.write_text(json.dumps(click))
            os.utime(path, (1_700_000_000 + files + number,) * 2)

    @property
    def script(self) -> Path:
        return SCRIPTS / "timers.py"

    def conf(self) -> dict[str, str]:
        # A batch without rows runs only in the start that ran the batch before it.
        return {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}

    @classmethod
    def count_files(cls, sealed: Manifest | None) -> int:
        return super().count_files(sealed) - _CLOSERS

    def outputs(self) -> dict[str, Any]:
        rows = read_files(self.folder / "out")
        return {"enriched": [row for row in rows if "'/end'" not in row]}


class TakenOver(Clicks):
    """A script that has run without tidegate, with checkpoints of its own."""

    name = "taken_over"
    queries: ClassVar[tuple[str, ...]] = ("enriched", "counted")

    @property
    def script(self) -> Path:
        return SCRIPTS / "taken_over.py"

    def find_committed(self) -> int:
        """How many batches both queries have ended, as Spark's own checkpoints say."""
        out = self.folder / "out"
        logs = [out / "enriched_checkpoint", out / "checkpoints" / "counted"]
        return min(len(list(log.glob("commits/[0-9]*"))) for log in logs)

    def outputs(self) -> dict[str, Any]:
        with sqlite3.connect(self.folder / "out" / "rows.sqlite") as db:
            (number,) = db.execute("SELECT sum(number) FROM numbers").fetchone()
        return {"enriched": read_files(self.folder / "out"), "counted": number}


class OddEnds(Clicks):
    """A script that hides how it ends."""

    name = "odd_ends"
    queries: ClassVar[tuple[str, ...]] = ("enriched",)

    @property
    def script(self) -> Path:
        return SCRIPTS / "odd_ends.py"

    def outputs(self) -> dict[str, Any]:
        return {"enriched": read_files(self.folder / "out")}


class Cron(OddEnds):
    """A script that ends when it has read what is there."""

    name = "cron"

    @property
    def script(self) -> Path:
        return SCRIPTS / "available_now.py"


class BadData(OddEnds):
    """A file that a query cannot read until someone corrects it."""

    name = "bad_data"

    def __init__(self, folder: Path, files: int) -> None:
        super().__init__(folder, files)
        for path in (folder / "in").iterdir():
            path.unlink()
        for number in range(files):
            self._write_prices(number)

    @property
    def script(self) -> Path:
        return SCRIPTS / "bad_data.py"

    def spoil(self) -> None:
        """Add a bad file and a good one behind it."""
        self._write_prices(self.files, _BAD_PRICE)
        self._write_prices(self.files + 1)

    def correct(self) -> None:
        """Correct the bad file."""
        self._write_prices(self.files)

    def is_named_in(self, log: str) -> bool:
        """Whether a driver has named the bad value."""
        return _BAD_PRICE in log

    def _write_prices(self, number: int, first: str = "12.50") -> None:
        rows = ({"id": 10 * number + row, "price": "1.25" if row else first} for row in range(10))
        path, hidden = (self.folder / "in" / f"{start}{number:05}.json" for start in ("", "."))
        hidden.write_text("\n".join(map(json.dumps, rows)))
        os.utime(hidden, (1_700_000_000 + number,) * 2)
        hidden.rename(path)  # a file appears whole


class Sessions(Clicks):
    """Sessions in SQLite, in memory and on the console; the last two cannot be read afterwards."""

    name = "sessions"
    queries: ClassVar[tuple[str, ...]] = ("in_database", "in_memory", "on_console")

    @property
    def script(self) -> Path:
        return SCRIPTS / "sessions.py"

    def outputs(self) -> dict[str, Any]:
        with sqlite3.connect(self.folder / "out" / "sessions.sqlite") as db:
            rows = db.execute("SELECT start, page, clicks FROM sessions").fetchall()
        return {"sessions": sorted(rows)}
