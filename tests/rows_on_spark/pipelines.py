"""The pipelines of ``make rows-on-spark``: their specs, and how their input gets into the store."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from pyarrow import orc
from ruamel.yaml import YAML

from tests.bench.generate import KEYS, generate, make_rows
from tests.bench.ours import JOBS, bench_spec
from tests.conformance.presets_on_spark import NAMES
from tests.conformance.spark_cases import EXAMPLES
from tests.rows_on_spark.checks import LARGEST_TASK
from tests.rows_on_spark.requests import StorePlace
from tests.rows_on_spark.rights import grant_rights
from tests.rows_on_spark.stage import Stage, build_spark_settings
from tidegate.checkpoints.store import Store
from tidegate.infra.flights import FlightsFeed
from tidegate.jobs.sources.byte_streams import find_codec
from tidegate.jobs.spec.loader import parse_spec, read_spec_text
from tidegate.jobs.spec.pipeline import PipelineSpec

ROOT: Final = Path(__file__).parents[2]
ROWS: Final = 800_000  # objects of 100,000 rows are above the size from which a footer may be read
FORMATS: Final = {"s0": "csv.gz", "s1": "avro", "s2": "orc", "s3": "json.gz"}
AVRO: Final = {
    "type": "record",
    "name": "row",
    "fields": [
        {"name": "source", "type": "int"},
        {"name": "seq", "type": "long"},
        {"name": "event_time", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "key", "type": ["null", "int"]},
        {"name": "value", "type": "double"},
    ],
}
Fields = dict[str, Any]
Fill = Callable[[Store, Path], None]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline to run.

    Attributes:
        name: for the table and for ARGS.
        fields: its spec, without Spark's master.
        fill: writes its input.
        options: further ones of the driver.
    """

    name: str
    fields: Fields
    fill: Fill
    options: tuple[str, ...] = ()


def upload_folder(store: Store, folder: Path) -> None:
    """Put every file of a folder into the store, at its path below the folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.upload(path, str(path.relative_to(folder)))


def fill_generated(store: Store, folder: Path, rows: int, files: int) -> None:
    """The rows of the benches."""
    generate(folder / "inbox", rows, files)
    upload_folder(store, folder)


def fill_formats(store: Store, folder: Path, rows: int) -> None:
    """The rows of the benches, each source in a format of its own, and a row that is dead."""
    generate(folder / "parquet", rows, 2)
    for path in sorted((folder / "parquet").rglob("*.parquet")):
        table = pq.read_table(path)
        source = path.parent.name
        place = folder / "inbox" / source / f"{path.stem}.{FORMATS[source]}"
        place.parent.mkdir(parents=True, exist_ok=True)
        if source == "s2":
            orc.write_table(table, place)
        elif source == "s1":
            with place.open("wb") as out:
                fastavro.writer(out, AVRO, table.to_pylist())
        else:
            lines = [{**row, "event_time": str(row["event_time"])} for row in table.to_pylist()]
            lines[0]["key"] = "no key"
            with gzip.open(place, "wt") as text:
                if source == "s0":
                    writer = csv.DictWriter(text, lines[0], quoting=csv.QUOTE_ALL)
                    writer.writeheader()
                    writer.writerows(lines)
                else:
                    text.writelines(f"{json.dumps(line)}\n" for line in lines)
    for source in FORMATS:
        (folder / "inbox" / source / "_DONE").touch()
    shutil.rmtree(folder / "parquet")
    upload_folder(store, folder)


def fill_large_text(store: Store, _folder: Path, rows: int) -> None:
    """The rows of one source of the benches in one object of CSV."""
    table, out = make_rows(np.random.default_rng(1), 0, 0, rows, KEYS), io.BytesIO()
    pacsv.write_csv(table, out)
    assert out.tell() > LARGEST_TASK
    store.put("inbox/s0/large.csv", out.getvalue())
    store.put("inbox/s0/_DONE", b"")


def fill_long_texts(store: Store, folder: Path, rows: int) -> None:
    """The rows of the benches, each with a text of 100 kB that does not compress well."""
    generate(folder / "inbox", rows, 2)
    dice = random.Random(5)
    for path in sorted((folder / "inbox").rglob("*.parquet")):
        table = pq.read_table(path)
        texts = [dice.randbytes(50_000).hex() for _ in range(table.num_rows)]
        pq.write_table(table.append_column("text", pa.array(texts)), path)
    upload_folder(store, folder)


def fill_preset(store: Store, _folder: Path, preset: str) -> None:
    """The input of a preset's example."""
    source = EXAMPLES / "input" / preset
    for path in sorted(source.rglob("*")):
        if path.is_file():
            store.upload(path, f"inbox/{preset}/{path.relative_to(source)}")


def fill_flights(store: Store, folder: Path) -> None:
    """The first hours of a day of flights, and the marker of their end."""
    airports = set()
    for number, item in enumerate(itertools.islice(FlightsFeed(days=1).objects(), 30)):
        path = folder / f"{number}.parquet"
        pq.write_table(item.table, path)
        store.upload(path, item.key)
        airports.add(item.airport)
    for airport in airports:
        store.put(f"inbox/{airport}/_DONE", b"")


def build_bench_fields(job: str, **own: Any) -> Fields:
    """The spec of a bench's job, with further fields."""
    found = bench_spec(job, {}).model_dump(mode="json", exclude_unset=True, by_alias=True)
    return {**found, "apiVersion": "tidegate/v1", **own}


def build_default_fields(name: str, **own: Any) -> Fields:
    """Ordered release and windows, with the events: what a spec has that chooses nothing else."""
    fields = build_bench_fields("both", name=name, **own)
    del fields["release"]
    return fields


def list_pipelines() -> list[Pipeline]:
    """All pipelines but the topic, which needs a broker."""
    flights = YAML(typ="safe").load((ROOT / "dags" / "pipelines" / "flights.yaml").read_text())
    for source in flights["sources"].values():
        source["bounded"] = True
    many, few = (
        partial(fill_generated, rows=ROWS, files=2),
        partial(fill_generated, rows=40, files=1),
    )
    counted = {"key": "int", "n": "long"}
    streams = build_default_fields(
        "streams",
        streams={"high": {}, "totals": {"schema": counted}, "counts": {"schema": counted}},
        pipes={"pick": {"from": "events", "to": "high", "where": "value > 0.5"}},
        reducers={
            "sum": {
                "from": "high",
                "to": "totals",
                "keys": ["key"],
                "aggregates": {"n": "count(*)"},
            },
            "count": {
                "from": "high",
                "to": "counts",
                "keys": ["key"],
                "function": "tests.rows_on_spark.reducers:count_rows",
                "initial": 0,
            },
        },
    )
    only_spark = build_default_fields("only_spark")
    for source in only_spark["sources"].values():
        source["where"] = "xxhash64(key) is not null"  # DuckDB has no such function
    edges = build_default_fields("edges")
    for source in edges["sources"].values():
        own = {name: name for name in source["schema"]}
        source["select"] = {**own, "kind": "cast(if(value > 0.5, 'start', 'end') as string)"}
        source["edges"] = {"kind": "kind", "keys": ["key"]}
    for window in edges["windows"].values():
        window |= {"late_unit": "event", "aggregates": {"n": "count(*)", "top": "max(abs(value))"}}
    formats = build_default_fields("formats")
    for name, source in formats["sources"].items():
        source["format"] = FORMATS[name].partition(".")[0]
    large = build_default_fields("large_text")
    large["sources"] = {"s0": {**large["sources"]["s0"], "format": "csv"}}
    texts = build_default_fields("long_texts")
    for source in texts["sources"].values():
        source["schema"] = {**source["schema"], "text": "string"}
    for window in texts["windows"].values():
        window["aggregates"] = {"top": "max(text)"}  # more than the driver may merge
    kept = build_default_fields("kept")
    for window in kept["windows"].values():
        window["aggregates"]["middle"] = "sql(percentile(value, 0.5))"  # of the rows themselves
    sinks = build_default_fields(
        "sinks",
        outputs={"layout": {"events": {"partition_by": ["bucket(4, key)"], "sort_by": ["value"]}}},
        sinks={"out": {"kind": "files", "path": "exports"}},
    )
    return [
        Pipeline("demo", flights, fill_flights),
        *(
            Pipeline(
                f"preset-{name}",
                YAML(typ="safe").load((EXAMPLES / f"{name}.yaml").read_text()),
                partial(fill_preset, preset=name),
            )
            for name in NAMES
        ),
        *(Pipeline(f"bench-{job}", build_bench_fields(job), many) for job in JOBS),
        Pipeline("default", build_default_fields("default"), many),
        Pipeline("streams", streams, partial(fill_generated, rows=40_000, files=2)),
        Pipeline("sinks", sinks, partial(fill_generated, rows=40_000, files=2)),
        Pipeline("only-spark", only_spark, many),
        Pipeline("edges", edges, partial(fill_generated, rows=4_000, files=2)),
        Pipeline("formats", formats, partial(fill_formats, rows=40_000)),
        Pipeline("large-text", large, partial(fill_large_text, rows=400_000)),
        Pipeline("long-texts", texts, partial(fill_long_texts, rows=320)),
        Pipeline("kept-rows", kept, partial(fill_generated, rows=40_000, files=2)),
        Pipeline("rows-40", build_default_fields("rows_40"), few),
    ]


def read_pipeline(spec: Path, folder: Path) -> Pipeline:
    """A spec that is not in the repository, with its input.

    Its sources get an end: `bounded`, and the marker where the folder has none. The files of a table
    have no end, so there the driver ends when it finds nothing more.

    Args:
        spec: the YAML file; its sources are folders of objects in the store.
        folder: holds each file where the spec has it in the store.
    """
    fields: Fields = read_spec_text(spec).merged
    places: list[str] = []
    options: tuple[str, ...] = ()
    for name, source in fields["sources"].items():
        path = str(source.get("path", ""))
        if source.get("kind") == "kafka" or "://" in path or not (folder / path).is_dir():
            raise ValueError(f"source {name}: its path has to be a folder below {folder}")
        if "table" in source:
            options = ("--until-idle", "15")
            continue
        source["bounded"] = True
        root = path.rstrip("/")
        members = [root]
        if source.get("partition_by") == "folder":
            members = [f"{root}/{one.name}" for one in (folder / root).iterdir() if one.is_dir()]
        places += [f"{member}/_DONE" for member in members]

    def fill(store: Store, _folder: Path) -> None:
        """Upload the files, then the markers."""
        upload_folder(store, folder)
        for place in places:
            if not (folder / place).exists():
                store.put(place, b"")

    return Pipeline(fields["name"], fields, fill, options)


def list_indivisible(store: Store) -> dict[str, dict[str, int]]:
    """What one task has to read of large objects, as `StorePlace` has it.

    The rows of a text, Avro or ORC object are counted from its beginning, and a compressed one is
    also read from there. Of Parquet it is a row group.
    """
    found: dict[str, dict[str, int]] = {"inspect": {}, "read": {}}
    for one in store.list_objects(""):
        if one.size <= LARGEST_TASK:
            continue
        if one.key.endswith(".parquet"):
            footer = pq.read_metadata(io.BytesIO(store.get(one.key).data))
            groups = map(footer.row_group, range(footer.num_row_groups))
            largest = max(
                sum(g.column(n).total_compressed_size for n in range(g.num_columns)) for g in groups
            )
            if largest > LARGEST_TASK:
                found["read"][one.key] = largest
            continue
        found["inspect"][one.key] = one.size
        if find_codec(one.key) is not None:
            found["read"][one.key] = one.size
    return found


def prepare(
    pipeline: Pipeline, stage: Stage, prefix: str
) -> tuple[PipelineSpec, list[str], StorePlace]:
    """Write input and spec of a pipeline; the spec, the command of its driver, and its place."""
    spark = {**pipeline.fields.get("spark", {}), "master": stage.master, "driver_memory": "1g"}
    spark["conf"] = {**spark.get("conf", {}), **build_spark_settings(stage.event_log)}
    text = json.dumps({**pipeline.fields, "spark": spark})  # JSON is YAML
    spec = parse_spec(text)
    file = stage.folder / f"{spec.name}.yaml"
    file.write_text(text)
    url = f"s3://{stage.minio.bucket}/{prefix}"
    folder = stage.folder / "input"
    folder.mkdir()
    store = stage.open_store(prefix)
    pipeline.fill(store, folder)
    indivisible = list_indivisible(store)
    if stage.driver_keys is not None and stage.executor_keys is not None:
        grant_rights(stage.minio, stage.driver_keys, stage.executor_keys, spec, prefix)
    store.close()
    windows = frozenset(spec.windows)
    place = StorePlace(stage.minio.bucket, prefix, spec.name, windows, indivisible)
    command = [sys.executable, "-m", "tidegate.jobs.driver", str(file), "--store", url]
    return spec, [*command, *pipeline.options], place
