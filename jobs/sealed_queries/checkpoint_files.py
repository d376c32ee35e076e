"""Selects the files of a Spark checkpoint that restore one batch of a query.

A checkpoint of Spark holds ``metadata``, ``offsets/N`` (the plan of batch N), ``commits/N``,
``sources/S/`` (the file source's own log) and ``state/``. Batch N leaves state of version N + 1:
``.delta`` or ``.changelog`` files on top of the newest ``.snapshot`` or ``.zip``. A ``.zip`` of
RocksDB names the SST files that it needs.

The rules were measured on Spark 4.1.3 (docs/decisions/0090-a-sealed-batch-is-a-manifest.md).
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

from .errors import UNKNOWN_CHECKPOINT_FORMAT

SINK_LOG: Final = "_sink"  # where a pack keeps the log of a file sink
_VERSION = re.compile(
    r"(?P<number>\d+)(?:_[0-9a-f-]{36})?\.(?P<kind>delta|changelog|snapshot|zip)(?:\.crc)?"
)
_LOG_ENTRY = re.compile(r"(\d+)(\.compact)?")
_SST_FOLDER = "SSTs"


def list_committed_batches(folder: Path) -> list[int]:
    """Return the committed batches of a query that Spark still keeps, oldest first."""
    return sorted(number for number, _, _ in _list_log(folder / "commits"))


def find_running_batch(folder: Path) -> int | None:
    """Return the batch that is planned and not committed; None between two batches."""
    planned = max((number for number, _, _ in _list_log(folder / "offsets")), default=None)
    done = planned is None or (folder / "commits" / str(planned)).exists()
    return None if done else planned


def count_state_partitions(folder: Path) -> int:
    """Return the number of partitions of the first stateful operator; 0 without state."""
    return sum(path.name.isdigit() for path in _list_folders(folder / "state" / "0"))


def select_restoring_files(
    folder: Path, batch: int, sink_log: Path | None = None
) -> dict[str, Path]:
    """Return the files that restore a query as it was after a committed batch.

    Spark may delete one of them at any time.

    Args:
        folder: the query's checkpoint, which may have gone on.
        batch: the batch.
        sink_log: the log folder of the query's file sink.

    Returns:
        Path in the restored checkpoint -> the file.

    Raises:
        FileNotFoundError: Spark has deleted the offsets of the batch.
        ConfigurationError: Spark's log has a format that this version cannot read.
    """
    offsets = read_offsets(folder, batch)
    found = {"metadata": folder / "metadata"}
    for log in ("offsets", "commits"):
        # Spark reads the batch before the newest one too when it starts.
        for number, _, path in _list_log(folder / log):
            if batch - 1 <= number <= batch:
                found[f"{log}/{path.name}"] = path
    for source in _list_folders(folder / "sources"):
        # The file source plans the next batch in its log before that batch is planned, so its log
        # ends where the offsets of this batch say.
        offset = offsets[int(source.name)]
        end = offset.get("logOffset") if isinstance(offset, Mapping) else None
        entries = (
            (path for path in source.iterdir() if not path.name.startswith("."))
            if end is None
            else _select_log_entries(source, end)
        )
        found |= {f"sources/{source.name}/{path.name}": path for path in entries}
    for path in _select_state(folder / "state", batch + 1):
        found[path.relative_to(folder).as_posix()] = path
    if sink_log is not None:
        found |= {f"{SINK_LOG}/{path.name}": path for path in _select_log_entries(sink_log, batch)}
    return found


def delete_uncommitted_state(folder: Path) -> list[Path]:
    """Delete what a batch without a commit has left in the state, and return the deleted files.

    Spark repeats such a batch under the same version. Its new file then need not fit the checksum
    file of the first attempt (SPARK-56461).
    """
    committed = list_committed_batches(folder)
    newest = committed[-1] + 1 if committed else 0
    state = folder / "state"
    left = [p for p in state.rglob("*") if (v := _parse_version(p)) and v[0] > newest]
    for path in left:
        path.unlink()
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    return left


def read_offsets(folder: Path, batch: int) -> list[Any]:
    """Return where each source of a query was after a batch: Spark's JSON, None for no offset.

    Raises:
        FileNotFoundError: the batch is not planned, or Spark has deleted its plan.
        ConfigurationError: a newer Spark wrote the log in a format that this version cannot read.
    """
    path = folder / "offsets" / str(batch)
    version, _, *lines = path.read_text("utf-8").splitlines()
    if version != "v1":
        raise UNKNOWN_CHECKPOINT_FORMAT(path=path, version=version)
    return [None if line == "-" else json.loads(line) for line in lines]


def read_query_id(folder: Path) -> str | None:
    """Return Spark's id of the query; None before its first start."""
    try:
        return str(json.loads((folder / "metadata").read_text("utf-8"))["id"])
    except (OSError, ValueError, KeyError):
        return None


def _list_log(folder: Path) -> Iterator[tuple[int, bool, Path]]:
    """Yield the entries of one of Spark's logs: number, whether it is compacted, file."""
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _LOG_ENTRY.fullmatch(path.name)
        if match:
            yield int(match[1]), match[2] is not None, path


def _select_log_entries(folder: Path, end: int) -> list[Path]:
    """Return the newest compacted entry up to `end`, and the entries behind it."""
    entries = [entry for entry in _list_log(folder) if entry[0] <= end]
    first = max((number for number, compacted, _ in entries if compacted), default=-1)
    return [
        path
        for number, compacted, path in entries
        if number > first or (compacted and number == first)
    ]


def _select_state(folder: Path, version: int) -> Iterator[Path]:
    """Yield the files of all state stores below a folder that hold this version."""
    if not folder.is_dir():
        return
    plain = [path for path in folder.iterdir() if not path.name.startswith(".")]
    versions = {path: parsed for path in plain if (parsed := _parse_version(path))}
    yield from _select_versions(folder, versions, version)
    for path in plain:
        if path.is_dir() and path.name != _SST_FOLDER:
            yield from _select_state(path, version)
        elif path.is_file() and path not in versions:
            yield path  # schemas and metadata


def _select_versions(
    folder: Path, versions: Mapping[Path, tuple[int, str]], version: int
) -> Iterator[Path]:
    kept = {path: parsed for path, parsed in versions.items() if parsed[0] <= version}
    bases = sorted({number for number, kind in kept.values() if kind in ("snapshot", "zip")})
    # A snapshot may be of an attempt that was not committed if there are change logs; then Spark
    # needs the one before it.
    logged = any(kind == "changelog" for _, kind in kept.values())
    first = bases[-2 if logged and len(bases) > 1 else -1] if bases else 0
    chosen = [path for path, (number, _) in kept.items() if number >= first]
    yield from chosen
    zips = (path for path in chosen if path.name.endswith(".zip"))
    names = set(chain.from_iterable(map(_read_sst_names, zips)))
    yield from (folder / _SST_FOLDER / name for name in sorted(names))


def _read_sst_names(path: Path) -> list[str]:
    """Return the names of the SST files that a snapshot of RocksDB needs."""
    with zipfile.ZipFile(path) as archive:
        text = archive.read("metadata").decode()
    content = json.loads(text.partition("\n")[2])
    files = [*content.get("sstFiles", ()), *content.get("logFiles", ())]
    return [file["dfsSstFileName"] for file in files if "dfsSstFileName" in file]


def _parse_version(path: Path) -> tuple[int, str] | None:
    match = _VERSION.fullmatch(path.name)
    return (int(match["number"]), match["kind"]) if match else None


def _list_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
