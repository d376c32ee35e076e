"""`tidegate init`, `put` and `reread`: a first spec from files, and files into the store."""

from __future__ import annotations

import csv
import hashlib
import json
import lzma
import os
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import arguments, output
from .arguments import DryRunOption, JsonOption, SpecArgument, StoreOption
from .errors import (
    FILE_EXISTS,
    NO_EVENT_TIME,
    NO_FILE,
    UNKNOWN_FORMAT,
    UNREADABLE_OBJECT,
    WHICH_SOURCE,
)

if TYPE_CHECKING:
    from tidegate.checkpoints.store import Store
    from tidegate.jobs.sources.schema_inference import ColumnSample
    from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
    from tidegate.json_types import JsonObject

_FORMATS = {
    **{form: form for form in ("parquet", "json", "csv", "avro", "orc")},
    "ndjson": "json",
    "jsonl": "json",
    "tsv": "csv",
}
_MOST_SAMPLES = 10  # objects per folder
_TICKS_PER_SECOND = 1_000_000
_LAGS = (1, 5, 10, 30, 60, 300, 900, 3600, 6 * 3600, 86_400)  # seconds
_SIZES = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}
_TEXT_FORMS = ("json", "csv")
_MOST_KEYS = 50  # different values of a column that still make a readable window table
_RECEIVED = re.compile("arriv|ingest|receiv|insert|updat|load|process|creat")


@dataclass(frozen=True)
class Sample:
    """What some objects of one folder hold, and what a spec has to say about their columns.

    Attributes:
        form: a `format` of a source.
        delimiter: of CSV objects; else a comma.
        columns: by name, with values of at most 10,000 rows of each object.
        evolution: the section `evolution` of the source; empty if it needs none.
    """

    form: str
    delimiter: str
    columns: dict[str, ColumnSample]
    evolution: JsonObject = field(default_factory=dict)

    def join(self, later: Sample) -> Sample:
        """Return the sample of both: format and delimiter of the first, no `evolution`."""
        names = {**self.columns, **later.columns}
        empty = type(next(iter(names.values())))("", [])
        joined = {n: self.columns.get(n, empty).join(later.columns.get(n, empty)) for n in names}
        return Sample(self.form, self.delimiter, joined)


def read_sample(address: str, form: str | None = None) -> Sample:
    """Read one object.

    Args:
        address: of the object, in a folder or a bucket.
        form: its format; None takes it from the name, which may end in a compression.

    Raises:
        ConfigurationError: the format is not known, or the object cannot be read as one.
    """
    from tidegate.checkpoints.open_store import open_store
    from tidegate.jobs.sources.schema_inference import choose_delimiter, sample_columns

    folder, _, name = address.rpartition("/")
    form = form or _find_format(name)
    if form is None or form not in _FORMATS.values():
        raise UNKNOWN_FORMAT(address=address, formats=", ".join(dict.fromkeys(_FORMATS.values())))
    if "://" not in address and not Path(address).is_file():
        raise NO_FILE(address=address)
    data = open_store(folder or ".", read_only=True).get(name).data
    try:
        delimiter = choose_delimiter(name, data) if form == "csv" else ","
        columns = sample_columns(name, data, form, delimiter)
    except (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError, csv.Error) as error:
        raise UNREADABLE_OBJECT(address=address, format=form, reason=error) from error
    return Sample(form, delimiter, columns)


FilesArgument = Annotated[
    list[str], typer.Argument(metavar="FILE...", help="Files of rows, or folders of them.")
]


def write_starter_spec(
    files: FilesArgument,
    name: Annotated[
        str | None, typer.Option(help="Name of the pipeline. Default: that of the folder.")
    ] = None,
    event_time: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="When the events happened.")
    ] = None,
    inbox: Annotated[
        bool, typer.Option("--inbox", help="Read copies in the store, which `tidegate put` makes.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Default: NAME.yaml in dags/pipelines if that exists, else here."
        ),
    ] = None,
) -> None:
    """Write a commented spec that reads FILES as they are, with one source per folder.

    Formats, columns, event time, units, time zones and lag are taken from at most 10 objects per
    folder and 10,000 rows of each. A spec that exists is never replaced. Beside it a first test
    case is written from the first rows.
    """
    from tidegate.jobs.cases.first_case import write_first_case
    from tidegate.jobs.spec.loader import parse_spec

    folders = _group_by_folder(files)
    pipeline = _make_name(name or os.path.commonpath(folders).rpartition("/")[2])
    samples = {folder: _sample_folder(folder, names) for folder, names in folders.items()}
    text = _format_starter_spec(pipeline, samples, event_time, inbox=inbox)
    home = Path("dags/pipelines")
    file = out or (home if home.is_dir() else Path()) / f"{pipeline}.yaml"
    if file.exists():
        raise FILE_EXISTS(file=file, advice="choose another --name or --out")
    spec = parse_spec(text, where=str(file))
    file.write_text(text)
    objects = {
        source: (Path(folder, folders[folder][0]), samples[folder].form)
        for source, folder in zip(spec.sources, samples, strict=True)
    }
    case = write_first_case(file, objects)
    output.print_line(f"written: {file}; read its comments, then:")
    if case is not None:
        output.print_line(
            f"  tidegate test {file if out else pipeline} --record  # then read {case}"
        )
    if inbox:
        output.print_line(f"  tidegate put {pipeline} {' '.join(folders)}")
    output.print_line(f"  tidegate run {file if out else pipeline} --until-end")


def put_files(
    pipeline: SpecArgument,
    files: FilesArgument,
    store: StoreOption = None,
    source: Annotated[
        str | None,
        typer.Option(help="Default: the only source, or the one with the name of FILE's folder."),
    ] = None,
    end: Annotated[
        bool, typer.Option("--end", help="No file follows; ends sources that are `bounded`.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace objects of the same name, to correct them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy files into the folders in the store from which a pipeline's sources read.

    A file that is there already is left out. One of the same name and another content is refused
    without --replace, and files before it stay copied. A warning names files that a driver may
    never read.
    """
    from tidegate.checkpoints.open_store import open_store
    from tidegate.jobs.sources.input_view import locate_source

    place = open_store(arguments.resolve_store_url(store))
    spec = arguments.find_or_read_spec(pipeline, store)
    copied: dict[str, list[str]] = {}
    lines: list[str] = []
    for folder, names in _group_by_folder(files).items():
        chosen = _choose_source(spec, source, folder)
        own = spec.sources[chosen]
        home, prefix = locate_source(chosen, own, place)
        by_key = own.table is None and own.discovery.order == "keys"
        before = home.list_objects(prefix) if by_key else iter(())
        newest = max((one.key for one in before if not one.key.endswith("/_DONE")), default="")
        replaced: list[str] | None = [] if replace else None
        copies = (_copy_file(home, Path(folder) / n, prefix + n, replaced) for n in names)
        fresh = [key for key in copies if key]
        copied.setdefault(chosen, []).extend(fresh)
        there = f"; {len(names) - len(fresh):,} were there already" * (len(fresh) < len(names))
        lines.append(f"copied {len(fresh):,} files to {chosen}{there}")
        if replaced:
            lines.append(
                f"replaced {len(replaced):,} of them: if a driver has read one, restore a"
                f" checkpoint from before: tidegate checkpoints list {spec.name}"
            )
        lines += [
            f"warning: {key} sorts before {newest}, so a driver that has read {newest} never reads"
            " it; give it a greater name, or set discovery: {order: arrival}"
            for key in fresh
            if key < newest and key not in (replaced or ())
        ]
        if end:
            home.put(f"{prefix}_DONE", b"")
    output.print_result(as_json, "put", copied, "\n".join(lines))


def read_dead_letters_again(
    pipeline: SpecArgument,
    store: StoreOption = None,
    source: Annotated[
        list[str] | None, typer.Option("--source", help="Only dead letters of this source.")
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read objects that were set aside, and broken lines, again: as new objects of their source.

    Objects are taken as they are now, so repair them first; lines need a spec that reads them. Each
    is read again once. Rows that are late by then are in the late table: see `tidegate splice`.
    """
    from tidegate.jobs.sinks.published_tables import read_table
    from tidegate.jobs.sources.input_view import locate_source
    from tidegate.jobs.spec.pipeline import DEAD_LETTERS

    spec, log = arguments.open_spec_and_log(pipeline, store)
    dead: dict[tuple[str, str], list[tuple[int, str | None]]] = defaultdict(list)
    for row in read_table(spec, log.store, DEAD_LETTERS).to_pylist():
        name, line = row["_source"], json.loads(row["row"] or "{}").get("_text")
        # Only text can be read again; `splice dead-letters` corrects typed values.
        wanted = name in (source or spec.sources) and spec.sources[name].path
        if wanted and (line or not row["row"]):
            dead[name, row["object"]].append((row["_seq"], line))
    copies: dict[str, list[str]] = {"copied": [], "copied_before": [], "gone": []}
    for (name, key), entries in dead.items():
        home, prefix = locate_source(name, spec.sources[name], log.store)
        own = key if prefix else key.removeprefix(f"@{name}/")
        data = _read_dead_text(home, own, sorted(entries), spec.sources[name])
        seed = f"{own} {min(entries)[0]}".encode() if entries[0][1] else data
        mark = f"-{hashlib.sha256(seed or b'').hexdigest()[:12]}-"
        names = [one.key for one in home.list_objects(prefix)]
        there = next((one for one in names if mark in one), None)
        if data is None or there:
            copies["copied_before" if there else "gone"].append(there or own)
            continue
        # Behind the newest name, and in front of the names that its producer gives next.
        # The time makes the names of copies grow.
        newest, ending = names[-1].partition("~reread-")[0], own.rpartition("/")[2]
        if entries[0][1]:
            ending = re.sub(r"\.(gz|bz2|xz|zst|lz4)$", "", ending)
        target = f"{newest}~reread-{time.time_ns():x}{mark}{ending.rpartition('~reread-')[2]}"
        copies["copied"].append(target)
        if not dry_run:
            home.create(target, data)
    lines = [f"{what.replace('_', ' ')}: {one}" for what, keys in copies.items() for one in keys]
    output.print_result(as_json, "reread", copies, "\n".join(lines) or "no dead letter can be read")


def _read_dead_text(
    home: Store, key: str, entries: list[tuple[int, str | None]], source: SourceSpec
) -> bytes | None:
    """Return an object as it is now, or only its dead lines; None if it is gone."""
    from tidegate.checkpoints.store import NotFoundError
    from tidegate.jobs.sources.object_decoding import decompress_object

    try:
        data = home.get(key).data
    except NotFoundError:
        return None
    lines = [line.encode() for _, line in entries if line]
    if not lines:
        return data
    if source.format == "csv" and source.parse.header:
        lines.insert(0, decompress_object(key, data).partition(b"\n")[0])
    return b"\n".join([*lines, b""])


def _copy_file(store: Store, file: Path, key: str, replaced: list[str] | None) -> str | None:
    """Return the key; None if the object is there. `replaced` takes the key of one that was not.

    Raises:
        ConfigurationError: another object has the key, and `replaced` is None.
    """
    there = store.stat(key)
    if there is None:
        return store.upload(file, key).key
    # Only files of one size are read: a checksum of the store's own depends on the store.
    if there.size != file.stat().st_size or store.get(key).data != file.read_bytes():
        if replaced is None:
            advice = "give a new file a name of its own, or correct this one with --replace"
            raise FILE_EXISTS(file=store.uri(key), advice=advice)
        replaced.append(key)
        return store.upload(file, key).key
    return None


def _choose_source(spec: PipelineSpec, given: str | None, folder: str) -> str:
    names = [name for name, one in spec.sources.items() if one.path]
    wanted = given or (names[0] if len(names) == 1 else folder.rpartition("/")[2])
    if wanted not in names:
        raise WHICH_SOURCE(file=folder, pipeline=spec.name, sources=", ".join(names))
    return wanted


def _find_format(name: str) -> str | None:
    endings = name.split(".")[1:]
    return next((_FORMATS[end.lower()] for end in endings if end.lower() in _FORMATS), None)


def _group_by_folder(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the folders of the files, with the names of the files in them, in order.

    Raises:
        ConfigurationError: a file does not exist, or a folder has no file of a known format.
    """
    folders: dict[str, list[str]] = defaultdict(list)
    for given in files:
        path = Path(given).absolute()
        found = [path] if path.is_file() else list(_list_files(path))
        if not found:
            raise NO_FILE(address=given)
        for file in found:
            folders[str(file.parent)].append(file.name)
    return {folder: sorted(set(names)) for folder, names in sorted(folders.items())}


def _list_files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        hidden = any(part[0] in "._" for part in file.relative_to(folder).parts)
        if not hidden and file.is_file() and _find_format(file.name):
            yield file


def _sample_folder(folder: str, names: list[str]) -> Sample:
    step = -(-len(names) // _MOST_SAMPLES)
    sample = reduce(Sample.join, (read_sample(f"{folder}/{name}") for name in names[::step]))
    # A spec can declare neither names of tidegate's own form nor those with quotes.
    renamed = {name: name.strip("_") for name in sample.columns if name.startswith("_")}
    columns = {renamed.get(name, name): one for name, one in sample.columns.items()}
    left_out = {name for name in columns if not name or re.search(r"""["'`\\]""", name)}
    evolution = {"renamed": renamed} if renamed else {}
    return replace(
        sample,
        columns={name: one for name, one in columns.items() if name not in left_out},
        evolution=evolution | ({"added": "ignore"} if left_out else {}),
    )


def _make_name(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).lstrip("_0123456789").rstrip("_") or "rows"


def _format_starter_spec(
    pipeline: str, samples: Mapping[str, Sample], event_time: str | None, *, inbox: bool
) -> str:
    samples = {folder: _clean_times(one, event_time) for folder, one in samples.items()}
    times = {folder: _choose_times(folder, one, event_time) for folder, one in samples.items()}
    event_columns = {own[0] for own in times.values()}
    samples = {
        folder: _rename_other_times(one, event_columns, times[folder][0])
        for folder, one in samples.items()
    }
    sources: dict[str, dict[str, str]] = {}
    for folder, sample in samples.items():
        name = _make_name(folder.rpartition("/")[2])
        while name in sources:
            name += "_"
        path = f"inbox/{pipeline}/{name}/" if inbox else f"{Path(folder).as_uri()}/"
        sources[name] = {"path": path, **_describe_source(sample, times[folder])}
    merged = reduce(Sample.join, samples.values())
    clocks = [samples[folder].columns[own[0]] for folder, own in times.items()]
    # Text has one unit for all times of a source, so other times stay what they are written as.
    other = "string" if any(column.epoch_unit for column in clocks) else "timestamp"
    kinds = {
        name: other if one.kind == "timestamp" else one.kind for name, one in merged.columns.items()
    }
    (first, fields), *others = sources.items()
    # The first one needs no empty section; in the others it replaces that of the first.
    sources[first] = {key: value for key, value in fields.items() if value != "{}"}
    # Of each other source only what differs.
    for name, own in others:
        sources[name] = {key: value for key, value in own.items() if value != fields.get(key)}
    return output.render_text(
        "starter_spec",
        pipeline=pipeline,
        sources=sources,
        kinds=kinds | dict.fromkeys(event_columns, "timestamp"),
        misfits=describe_misfits(merged),
        window=_propose_window(merged, event_columns, clocks),
    )


def describe_misfits(sample: Sample) -> list[str]:
    """Return a sentence for each column that is declared as text because of a few values."""
    return [
        f"{name}: {found[1]:,} of {len(one.texts):,} values are not of type {found[0]}; declare it"
        " so, and their rows become dead letters"
        for name, one in sample.columns.items()
        if (found := one.count_misfits())
    ]


def _clean_times(sample: Sample, wanted: str | None) -> Sample:
    """Leave values out that are no times: of the wanted column, or of one if each has some.

    Only of text formats: a text in a typed format never becomes a time.
    """
    if sample.form not in _TEXT_FORMS:
        return sample
    names = [wanted] if wanted in sample.columns else [] if _list_times(sample) else sample.columns
    for name in names:
        cleaned = sample.columns[name].keep_times()
        if cleaned is not sample.columns[name]:
            return replace(sample, columns={**sample.columns, name: cleaned})
    return sample


def _list_times(sample: Sample) -> list[str]:
    """Columns that can be event times."""
    text = sample.form in _TEXT_FORMS
    return [
        name
        for name, one in sample.columns.items()
        if one.kind == "timestamp" or (text and (one.kind == "date" or one.epoch_unit))
    ]


def _choose_times(folder: str, sample: Sample, wanted: str | None) -> list[str]:
    """Return the columns that can be event times, the most likely one first.

    Raises:
        ConfigurationError: there is none.
    """
    found = [name for name in _list_times(sample) if wanted in (None, name)]
    if not found:
        columns = ", ".join(f"{name} ({one.kind})" for name, one in sample.columns.items())
        raise NO_EVENT_TIME(folder=folder, columns=columns)
    return sorted(
        found, key=lambda n: (bool(_RECEIVED.search(n)), sample.columns[n].kind == "date")
    )


def _rename_other_times(sample: Sample, event_columns: set[str], own: str) -> Sample:
    """Rename columns that are event times in other folders, and no times of this folder's clock.

    A column has one type in all sources, so their rows would be dead letters.
    """
    columns, unit = dict(sample.columns), sample.columns[own].epoch_unit
    renamed = dict(sample.evolution.get("renamed", {}))
    for name in [n for n, one in columns.items() if n in event_columns and one.kind]:
        if name in _list_times(sample) and columns[name].epoch_unit == unit:
            continue
        kind = columns[name].kind.partition("(")[0]  # without the digits of a decimal
        new = f"{name}_{'text' if kind == 'string' else kind}"
        while new in columns:
            new += "_"
        columns[new] = columns.pop(name)
        given = next((old for old, now in renamed.items() if now == name), name)
        renamed[given] = new
    evolution = sample.evolution | ({"renamed": renamed} if renamed else {})
    return replace(sample, columns=columns, evolution=evolution)


def _describe_source(sample: Sample, times: list[str]) -> dict[str, str]:
    """Return the fields of a source as YAML, most with a comment; empty ones are left out."""
    from tidegate.time_units import format_duration

    column = sample.columns[times[0]]
    others = ", ".join(name for name in times[1:] if name in sample.columns)
    disorder = column.measure_disorder()
    seconds = -(-disorder // _TICKS_PER_SECOND)
    lag = next((lag for lag in _LAGS if lag >= seconds), -(-seconds // 86_400) * 86_400)
    unit = column.epoch_unit
    parse = {"timestamps": unit} if unit else {}
    if sample.delimiter != ",":
        parse["delimiter"] = sample.delimiter
    naive = [name for name, one in sample.columns.items() if one.lacks_zone and not unit]
    return {
        "format": sample.form,
        "event_time": json.dumps(times[0]) + (f"  # other times: {others}" if others else ""),
        "parse": json.dumps(parse),
        "evolution": json.dumps(sample.evolution),
        "timezone": f"UTC  # {naive[0]} names no zone: write that of its clock" if naive else "",
        "lag": f"{format_duration(lag * _TICKS_PER_SECOND)}  # in the sample, a row is at most"
        f" {format_duration(disorder)} older than a row before it",
        "max_jump": "365d  # a row so far ahead of all others does not move the frontier",
        "discovery": "{order: arrival}  # file names need not grow",
    }


def _propose_window(
    merged: Sample, times: set[str], clocks: Iterable[ColumnSample]
) -> dict[str, str | None]:
    """Return size, key and summed column of a window with at most some fifty results per key."""
    instants = [instant for column in clocks for instant in column.list_instants()]
    span = max(instants) - min(instants) if instants else 0
    seconds = span / 50 / _TICKS_PER_SECOND
    texts = {name: {*one.texts} for name, one in merged.columns.items() if one.kind == "string"}
    counts = {name: len(values) for name, values in texts.items() if name not in times}
    numbers = [n for n, one in merged.columns.items() if one.kind == "double" and n not in times]
    return {
        "unit": next((unit for unit, size in _SIZES.items() if size >= seconds), "day"),
        "key": next((name for name, count in counts.items() if 1 < count <= _MOST_KEYS), "_source"),
        "summed": next(iter(numbers), None),
    }
