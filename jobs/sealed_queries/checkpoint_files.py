"""Selects the files of a Spark checkpoint that restore one batch of a query.

A checkpoint of Spark holds ``metadata``, ``offsets/N`` (the plan of batch N), ``commits/N``,
``sources/S/`` (the file source's own log) and ``state/``. Batch N leaves state of version N + 1:
``.delta`` or ``.changelog`` files on top of the newest ``.snapshot`` or ``.zip``. A ``.zip`` of
RocksDB names the SST files that it needs.

The rules were measured on Spark 4.1.3 (docs/decisions/0090-a-sealed-batch-is-a-manifest.md).
"""

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from .checkpoint_folder import CheckpointFile, CheckpointFolder, HostFolder
from .errors import UNKNOWN_CHECKPOINT_FORMAT

SINK_LOG = "_sink"  # where a pack keeps the log of a file sink
_VERSION = re.compile(
    r"(?P<number>\d+)(?:_[0-9a-f-]{36})?\.(?P<kind>delta|changelog|snapshot|zip)(?:\.crc)?"
)
_LOG_ENTRY = re.compile(r"(\d+)(\.compact)?")
_SST_FOLDER = "SSTs"
_SCHEMA_NOTES = "_metadata/v2/"  # of an operator
_SCHEMA_PATH = re.compile(r'"[^"]*(/state/\d+/_stateSchema/)')


def list_committed_batches(folder: CheckpointFolder) -> list[int]:
    """Return the committed batches of a query that Spark still keeps, oldest first."""
    return sorted(number for number, _, _ in _parse_log(folder.list_files("commits/")))


def find_planned_batch(folder: CheckpointFolder) -> int | None:
    """Return the newest batch that is planned, committed or not; None before the first."""
    plans = _parse_log(folder.list_files("offsets/"))
    return max((number for number, _, _ in plans), default=None)


def find_running_batch(folder: CheckpointFolder) -> int | None:
    """Return the batch that is planned and not committed; None between two batches."""
    planned = find_planned_batch(folder)
    done = planned is None or planned in list_committed_batches(folder)
    return None if done else planned


def count_state_partitions(folder: CheckpointFolder) -> int:
    """Return the number of partitions of the first stateful operator; 0 without state."""
    names = {path.split("/")[2] for path in folder.list_files("state/0/")}
    return sum(name.isdigit() for name in names)


def select_restoring_files(
    folder: CheckpointFolder, batch: int, sink_log: Path | None = None
) -> dict[str, CheckpointFile]:
    """Return the files that restore a query as it was after a committed batch.

    Spark may delete one of them at any time.

    Args:
        folder: the query's checkpoint, which may have gone on.
        batch: the batch.
        sink_log: the log folder of the query's file sink.

    Returns:
        Path in the restored checkpoint -> the file.

    Raises:
        FileNotFoundError: Spark has deleted a file that the batch needs.
        ConfigurationError: Spark's log has a format that this version cannot read.
    """
    offsets = read_offsets(folder, batch)
    files = folder.list_files()
    by_folder: dict[str, list[str]] = defaultdict(list)
    for path in files:
        by_folder[path.rpartition("/")[0]].append(path)
    found = {"metadata", f"offsets/{batch}", f"commits/{batch}"}
    for log in ("offsets", "commits"):
        # Spark reads the batch before the newest one too when it starts.
        found |= {path for number, _, path in _parse_log(by_folder[log]) if number == batch - 1}
    for number, offset in enumerate(offsets):
        # The file source plans the next batch in its log before that batch is planned, so its log
        # ends where the offsets of this batch say.
        end = offset.get("logOffset") if isinstance(offset, Mapping) else None
        entries = by_folder[f"sources/{number}"]
        found |= set(entries if end is None else _select_log_entries(entries, end))
    for parent, paths in by_folder.items():
        if parent.split("/")[0] == "state" and not parent.endswith(f"/{_SST_FOLDER}"):
            ssts = by_folder.get(f"{parent}/{_SST_FOLDER}", [])
            found |= set(_select_state(files, paths, ssts, batch + 1))
    if gone := found - files.keys():
        raise FileNotFoundError(f"{folder.address}/{min(gone)}")
    # `metadata` first: the pack that holds it has the newest form of what a start wrote again.
    selected = {path: files[path] for path in ["metadata", *sorted(found - {"metadata"})]}
    if sink_log is not None:
        log_files = HostFolder(sink_log).list_files()
        for path in _select_log_entries(log_files, batch):
            selected[f"{SINK_LOG}/{path}"] = log_files[path]
    return selected


def list_uncommitted_state(folder: CheckpointFolder) -> list[str]:
    """Return what a batch without a commit has left in the state.

    Spark repeats such a batch under the same version. Its new file then need not fit the checksum
    file of the first attempt (SPARK-56461).
    """
    committed = list_committed_batches(folder)
    newest = committed[-1] + 1 if committed else 0
    versions = ((path, _parse_version(path)) for path in folder.list_files("state/"))
    return [path for path, version in versions if version is not None and version[0] > newest]


def replace_schema_paths(folder: Path, home: str) -> None:
    """Let the operators of a copied checkpoint find their schemas in the copy.

    Spark notes absolute paths of the schemas of `transformWithState`, and reads them at each start.

    Args:
        folder: the copy.
        home: address of the place where the copy will be when a query starts from it.
    """
    for path in (folder / "state").glob(f"*/{_SCHEMA_NOTES}[0-9]*"):
        before = path.read_text("utf-8")
        path.write_text(_SCHEMA_PATH.sub(rf'"{home}\1', before), "utf-8")


def is_for_host(path: str) -> bool:
    """Return whether a file passes through this host on its way into a bucket.

    `metadata` comes last, notes of schemas are rewritten, and the log of a file sink stays here.
    """
    return path == "metadata" or _SCHEMA_NOTES in path or path.startswith(f"{SINK_LOG}/")


def read_offsets(folder: CheckpointFolder, batch: int) -> list[Any]:
    """Return where each source of a query was after a batch: Spark's JSON, None for no offset.

    Raises:
        FileNotFoundError: the batch is not planned, or Spark has deleted its plan.
        ConfigurationError: a newer Spark wrote the log in a format that this version cannot read.
    """
    path = f"offsets/{batch}"
    version, _, *lines = folder.read(path).decode().splitlines()
    if version != "v1":
        raise UNKNOWN_CHECKPOINT_FORMAT(path=f"{folder.address}/{path}", version=version)
    return [None if line == "-" else json.loads(line) for line in lines]


def read_query_id(folder: CheckpointFolder) -> str | None:
    """Return Spark's id of the query; None before its first start."""
    try:
        return str(json.loads(folder.read("metadata"))["id"])
    except (OSError, ValueError, KeyError):
        return None


def _parse_log(paths: Iterable[str]) -> Iterator[tuple[int, bool, str]]:
    """Yield the entries of one of Spark's logs: number, whether it is compacted, path."""
    for path in paths:
        match = _LOG_ENTRY.fullmatch(path.rpartition("/")[2])
        if match:
            yield int(match[1]), match[2] is not None, path


def _select_log_entries(paths: Iterable[str], end: int) -> list[str]:
    """Return the newest compacted entry up to `end`, and the entries behind it."""
    entries = [entry for entry in _parse_log(paths) if entry[0] <= end]
    first = max((number for number, compacted, _ in entries if compacted), default=-1)
    return [
        path
        for number, compacted, path in entries
        if number > first or (compacted and number == first)
    ]


def _select_state(
    files: Mapping[str, CheckpointFile], paths: list[str], ssts: list[str], version: int
) -> Iterator[str]:
    """Yield the files of one folder of the state that hold a version, schemas included."""
    versions = {path: parsed for path in paths if (parsed := _parse_version(path))}
    yield from (path for path in paths if path not in versions)
    kept = {path: parsed for path, parsed in versions.items() if parsed[0] <= version}
    bases = sorted({number for number, kind in kept.values() if kind in ("snapshot", "zip")})
    # A snapshot may be of an attempt that was not committed if there are change logs; then Spark
    # needs the one before it.
    logged = any(kind == "changelog" for _, kind in kept.values())
    first = bases[-2 if logged and len(bases) > 1 else -1] if bases else 0
    chosen = [path for path, (number, _) in kept.items() if number >= first]
    yield from chosen
    zips = [files[path] for path in chosen if path.endswith(".zip")]
    if all(isinstance(file, Path) for file in zips):
        names = chain.from_iterable(
            _read_sst_names(file) for file in zips if isinstance(file, Path)
        )
        yield from (f"{paths[0].rpartition('/')[0]}/{_SST_FOLDER}/{name}" for name in names)
    else:
        yield from ssts  # all that Spark keeps: to read each snapshot would cost a request


def _read_sst_names(path: Path) -> list[str]:
    """Return the names of the SST files that a snapshot of RocksDB needs."""
    with zipfile.ZipFile(path) as archive:
        text = archive.read("metadata").decode()
    content = json.loads(text.partition("\n")[2])
    files = [*content.get("sstFiles", ()), *content.get("logFiles", ())]
    return [file["dfsSstFileName"] for file in files if "dfsSstFileName" in file]


def _parse_version(path: str) -> tuple[int, str] | None:
    match = _VERSION.fullmatch(path.rpartition("/")[2])
    return (int(match["number"]), match["kind"]) if match else None
