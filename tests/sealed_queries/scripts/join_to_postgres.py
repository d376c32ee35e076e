"""Plain PySpark: two streams of files, joined within a minute, by foreachBatch into PostgreSQL."""

import sys

import psycopg
from pyspark.sql import DataFrame, SparkSession, functions

from tidegate.job import on_restore

source, database = sys.argv[1:3]


def write_pairs(pairs: DataFrame, batch: int) -> None:
    """Put the pairs of a batch into the table; a repeated batch replaces its own rows."""
    rows = [(batch, str(r.at), r.page, str(r.other_at)) for r in pairs.collect()]
    with psycopg.connect(database) as db:
        db.execute("CREATE TABLE IF NOT EXISTS pairs (batch INT, at TEXT, page TEXT, other TEXT)")
        db.execute("DELETE FROM pairs WHERE batch = %s", [batch])
        with db.cursor() as cursor:
            cursor.executemany("INSERT INTO pairs VALUES (%s, %s, %s, %s)", rows)


@on_restore("joined")
def forget_pairs(query: str, batch: int | None) -> None:
    """Delete what the batches after `batch` have written."""
    with psycopg.connect(database) as db:
        db.execute("DELETE FROM pairs WHERE batch > %s", [-1 if batch is None else batch])


spark = SparkSession.builder.appName("joined").master("local[2]").getOrCreate()
spark.conf.set("spark.sql.shuffle.partitions", "2")


def read(side: str) -> DataFrame:
    """One of the two streams."""
    clicks = spark.readStream.schema("at timestamp, user string, page string")
    files = clicks.option("maxFilesPerTrigger", 1).json(f"{source}/{side}")
    return files.withWatermark("at", "1 minute")


left = read("left").select("at", "page")
right = read("right").select(
    functions.col("at").alias("other_at"), functions.col("page").alias("other_page")
)
near = functions.expr("page = other_page AND other_at BETWEEN at - INTERVAL 5 SECONDS AND at")
(
    left.join(right, near)
    .writeStream.queryName("joined")
    .trigger(processingTime="1500 milliseconds")
    .foreachBatch(write_pairs)
    .start()
    .awaitTermination()
)
