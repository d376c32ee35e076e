"""Input of the applications, and what their files hold."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "clicks"


def read_counts(out: Path) -> list[tuple[str, str, int]]:
    """The newest count of each minute and page that `foreachBatch` wrote.

    Each batch wrote a key once, and a larger count than the batch before.
    """
    newest: dict[tuple[str, str], int] = {}
    with sqlite3.connect(out / "clicks.sqlite") as db:
        for minute, page, clicks in db.execute(
            "SELECT minute, page, clicks FROM counts ORDER BY batch"
        ):
            assert clicks > newest.get((minute, page), 0), f"{minute} {page} twice"
            newest[minute, page] = clicks
    return sorted((*key, clicks) for key, clicks in newest.items())


def count_clicks(folder: Path) -> list[tuple[str, str, int]]:
    """What `read_counts` should give for a folder of input."""
    totals = Counter[tuple[str, str]]()
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            click = json.loads(line)
            totals[f"{click['at'][:10]} {click['at'][11:16]}:00", click["page"]] += 1
    return sorted((*key, clicks) for key, clicks in totals.items())


def read_files(out: Path) -> list[str]:
    """The rows of the file sink, as a reader of its log sees them; sorted.

    Spark deletes entries of the log once they are compacted.
    """
    log = out / "enriched" / "_spark_metadata"
    entries = [path for path in log.iterdir() if path.name[0].isdigit()]
    compacted = [path for path in entries if path.suffix == ".compact"]
    newest = max(compacted, key=_get_number, default=None)
    first = -1 if newest is None else _get_number(newest)
    later = [path for path in entries if _get_number(path) > first]
    found = []
    for entry in [*([newest] if newest else []), *later]:
        for line in entry.read_text().splitlines()[1:]:
            table = pq.read_table(json.loads(line)["path"].removeprefix("file://"))
            found += [repr(row) for row in table.to_pylist()]
    return sorted(found)


def _get_number(entry: Path) -> int:
    return int(entry.name.partition(".")[0])


def write_clicks(folder: Path, files: int, rows: int = 60, seed: int = 7) -> None:
    """Write the input at once; the files have an order by age, in which Spark reads them."""
    folder.mkdir()
    dice, begin = random.Random(seed), datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(files):
        lines = []
        for _ in range(rows):
            at = begin + timedelta(seconds=40 * number + dice.random() * 40)
            page = f"/{dice.choice(['news', 'shop', 'help'])}/{dice.randrange(5)}"
            lines.append(json.dumps({"at": at.isoformat(), "user": "u", "page": page}))
        path = folder / f"{number:05}.json"
        path.write_text("\n".join(lines))
        os.utime(path, (1_700_000_000 + number,) * 2)
