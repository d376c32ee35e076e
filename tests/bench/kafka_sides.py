"""One side of the Kafka bench, in a process of its own.

``python -m tests.bench.kafka_sides fill|ours|plain SERVERS FOLDER``.

``fill`` writes the generated files of FOLDER into the topic, a partition for each source, in order.
``ours`` and ``plain`` read the topic from its beginning and write below FOLDER; each prints one
JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from tests.bench import plain
from tests.bench.generate import SOURCES
from tests.bench.ours import JOBS, run
from tidegate.jobs.driver.log_output import configure_logs
from tidegate.jobs.spec.pipeline import PipelineSpec

TOPIC: Final = "rows"
_FIELDS: Final = "seq bigint, event_time timestamp, key int, value double"
_CLOSING: Final = (  # behind every row: closes the last windows of both sides
    "timestamp_millis(1700000000000) + INTERVAL 100 DAYS"
)


def fill(spark: Any, source: Path, servers: str) -> None:
    """Write every row as JSON, and one more to each partition."""
    for place in range(SOURCES):
        rows = (
            spark.read.parquet(str(source / f"s{place}"))
            .coalesce(1)
            .select("seq", "event_time", "key", "value")
        )
        last = spark.range(1).selectExpr(
            "-1L AS seq", f"{_CLOSING} AS event_time", "-1 AS key", "0D AS value"
        )
        for frame in (rows, last):
            messages = frame.selectExpr("to_json(struct(*)) AS value", f"{place} AS partition")
            messages.write.format("kafka").option("kafka.bootstrap.servers", servers).option(
                "topic", TOPIC
            ).save()


def spec_of(servers: str, batch: int) -> PipelineSpec:
    """The windows of `make bench-windows` over the topic."""
    schema = {"seq": "long", "event_time": "timestamp", "key": "int", "value": "double"}
    source = {
        "kind": "kafka",
        "kafka": {"servers": servers, "topic": TOPIC},
        "schema": schema,
        "event_time": "event_time",
        "lag": "10s",
        "limits": {"rows": batch // SOURCES},
    }
    fields = {
        "name": "bench_windows",
        "sources": {"topic": source},
        "spark": {"driver_memory": "4g"},
    }
    return PipelineSpec.model_validate(
        {**fields, **JOBS["windows"], "coalesce": {"idle_timeout": "never"}}
    )


def read_plainly(spark: Any, servers: str, batch: int) -> Any:
    """The topic as a stream, in batches as large as our epochs."""
    messages = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", TOPIC)
    )
    messages = (
        messages.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", batch).load()
    )
    return messages.selectExpr(f"from_json(CAST(value AS string), '{_FIELDS}') AS row").select(
        "row.*"
    )


def main() -> None:
    """Play one side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("side", choices=["fill", "ours", "plain"])
    parser.add_argument("servers")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--rows", type=int, default=0, help="of the topic: ours ends when they are sealed"
    )
    parser.add_argument("--batch", type=int, default=0, help="rows of an epoch or batch")
    given = parser.parse_args()
    configure_logs(json=False)
    jars = os.environ["TIDEGATE_SPARK_JARS"]
    with contextlib.redirect_stdout(sys.stderr):
        if given.side == "ours":
            found = run(spec_of(given.servers, given.batch), given.folder, rows=given.rows)
        elif given.side == "plain":
            spark = plain.open_session(**{"spark.jars": jars})
            found = plain.run(
                spark, lambda: read_plainly(spark, given.servers, given.batch), given.folder
            )
        else:
            # One task for each file, so that a partition has the order of its rows.
            whole = {
                "spark.sql.files.maxPartitionBytes": "4g",
                "spark.sql.files.openCostInBytes": "4g",
            }
            fill(plain.open_session(**{"spark.jars": jars, **whole}), given.folder, given.servers)
            found = {}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
