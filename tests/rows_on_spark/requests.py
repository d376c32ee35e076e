"""What a request to the store moves: rows, a footer, or something that the driver may touch.

`TABLES_OF_DRIVER` and `classify_request` are the one list of it. docs/architecture.md, section
"What the driver may touch", says the same in prose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import unquote

from tidegate.checkpoints.store_probe import PROBE_PREFIX

RESULT_BOUND: Final = 16 << 20
"""Bytes of merged window results that the driver may touch in one epoch, on every master."""
SMALL_OBJECT: Final = 1 << 20
"""Of an object above this size the driver may read the footer, of others nothing."""
TABLES_OF_DRIVER: Final = frozenset({"barriers", "checkpoints"})
"""Tables whose rows are the driver's own."""
DEAD_OBJECTS: Final = re.compile(r"timelines/\d+/tables/dead_letters/[^/]+/driver\.parquet")
"""Files with rows that name a dead object; the other dead letters are rows."""
_TABLE_FILE = re.compile(r"timelines/\d+/tables/([^/]+)/")
_WINDOW_STATE = re.compile(
    r"timelines/\d+/state/[^/]+/window-([^/]+?)(-\d{5}-[0-9a-f]{12}|-\d+)?\.parquet"
)
"""The state of a window is its merged partial results."""
_OPEN_GROUP: Final = re.compile(r"timelines/\d+/state/[^/]+/glom-[^/]+\.parquet")
"""Counts and times of the group of built events that is still open, in one row."""
_ATTEMPT = re.compile(r"\d+-[0-9a-f]{12}")
_SPANS = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

Content = Literal["rows", "footers", "results", "other"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request that the proxy has passed on."""

    pid: int
    kind: str
    """Of the process, as `processes.Family` names it."""
    method: str
    path: str
    """As sent: the bucket, the key, and perhaps a query."""
    size: int
    """Bytes of the body that carries data, sent or received."""
    content_range: str = ""
    """Of the answer."""
    ended: float = 0.0
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where one pipeline and its input are in the store."""

    bucket: str
    prefix: str
    pipeline: str
    windows: frozenset[str] = frozenset()
    indivisible: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Job -> object of the input -> bytes of it that one task has to read, if they are too many."""

    def get_key(self, path: str) -> str | None:
        """The key below the store's prefix, or None for a request that names no object."""
        bare = unquote(path.partition("?")[0]).lstrip("/")
        root = f"{self.bucket}/{self.prefix.strip('/')}".rstrip("/") + "/"
        return bare.removeprefix(root) if bare.startswith(root) and bare != root else None


def classify_request(request: Request, place: StorePlace) -> Content:
    """Return what the body of a request carries."""
    key = place.get_key(request.path)
    if key is None or request.method in ("HEAD", "DELETE"):
        return "other"
    if request.method == "POST" and "delete" in request.path.partition("?")[2]:
        return "other"
    content = classify_key(key, place)
    if content == "rows" and is_footer(request, key):
        return "footers"
    return content


def classify_key(key: str, place: StorePlace) -> Content:
    """Return what an object holds, by its key below the store's prefix."""
    if key.startswith(PROBE_PREFIX):
        return "other"  # what the driver asks of a store at its start
    own = f"{place.pipeline}/"
    if not key.startswith(own):
        return "rows"  # an object of the input
    rest = key.removeprefix(own)
    if DEAD_OBJECTS.fullmatch(rest):
        return "other"
    if table := _TABLE_FILE.match(rest):
        return _classify_table(table[1], place)
    if _OPEN_GROUP.fullmatch(rest):
        return "results"
    state = _WINDOW_STATE.fullmatch(rest)
    if state and state[1] in place.windows:
        return "results"
    if rest.startswith("timelines/") and "/slots/" in rest:
        return "other"
    # Other segments of state, the files that tasks and driver exchange, rows that were spliced in.
    moved = rest.startswith(("timelines/", "staging/"))
    return "rows" if moved or rest.endswith((".parquet", ".arrow")) else "other"


def name_folder(request: Request, place: StorePlace) -> str:
    """The folder of an object, with one name for those of all attempts."""
    folder = (place.get_key(request.path) or "").rpartition("/")[0]
    return _ATTEMPT.sub("...", folder) + "/"


def _classify_table(table: str, place: StorePlace) -> Content:
    if table in TABLES_OF_DRIVER:
        return "other"
    return "results" if table in place.windows else "rows"


def is_footer(request: Request, key: str) -> bool:
    """Whether it read the end of a large Parquet object by range, and no more than a footer."""
    span = _SPANS.fullmatch(request.content_range)
    if request.method != "GET" or span is None or not key.endswith(".parquet"):
        return False
    first, last, size = map(int, span.groups())
    return size > SMALL_OBJECT and last == size - 1 and last - first < SMALL_OBJECT
