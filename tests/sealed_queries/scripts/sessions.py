"""Plain PySpark: sessions of pages into SQLite, into a table in memory, and onto the console."""

import sqlite3
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.streaming.readwriter import DataStreamWriter

from tidegate.job import on_restore

source, target = sys.argv[1:]
database = Path(target) / "sessions.sqlite"
database.parent.mkdir(exist_ok=True)


def write_sessions(sessions: DataFrame, batch: int) -> None:
    """Replace all sessions by those of the batch."""
    rows = [(str(r.start), r.page, r.clicks) for r in sessions.collect()]
    with sqlite3.connect(database) as db:
        db.execute("CREATE TABLE IF NOT EXISTS sessions (start TEXT, page TEXT, clicks INT)")
        db.execute("DELETE FROM sessions")
        db.executemany("INSERT INTO sessions VALUES (?, ?, ?)", rows)


@on_restore("in_database")
def keep_sessions(query: str, batch: int | None) -> None:
    """Take nothing back: the next batch replaces everything."""


spark = SparkSession.builder.appName("sessions").master("local[2]").getOrCreate()
spark.conf.set("spark.sql.shuffle.partitions", "2")
sessions = (
    spark.readStream.schema("at timestamp, user string, page string")
    .option("maxFilesPerTrigger", 1)
    .json(source)
    .withWatermark("at", "1 minute")
    .groupBy(functions.session_window("at", "2 seconds"), "page")
    .agg(functions.count("*").alias("clicks"))
    .select("session_window.start", "page", "clicks")
)


def write(name: str, mode: str) -> DataStreamWriter:
    """Begin a query over the sessions."""
    writer = sessions.writeStream.queryName(name).outputMode(mode)
    return writer.trigger(processingTime="1500 milliseconds")


write("in_database", "complete").foreachBatch(write_sessions).start()
write("in_memory", "complete").format("memory").start()
write("on_console", "append").format("console").start()
spark.streams.awaitAnyTermination()
