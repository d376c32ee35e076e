"""Plain PySpark that hides how it ends: a wait in a thread, errors swallowed, an own handler, exit code 1."""

import signal
import sys
import threading
from contextlib import suppress

from pyspark.sql import SparkSession, functions

source, target = sys.argv[1:]
spark = SparkSession.builder.appName("ends").master("local[2]").getOrCreate()
query = (
    spark.readStream.schema("at timestamp, user string, page string")
    .option("maxFilesPerTrigger", 1)
    .json(source)
    .withColumn("section", functions.split("page", "/")[1])
    .writeStream.queryName("enriched")
    .trigger(processingTime="1500 milliseconds")
    .start(f"{target}/enriched")
)
signal.signal(signal.SIGTERM, lambda *_: query.stop())


def wait_for_end() -> None:
    """Wait, and say nothing of an error."""
    with suppress(Exception):
        query.awaitTermination()


waiting = threading.Thread(target=wait_for_end)
waiting.start()
while waiting.is_alive():
    waiting.join(0.2)
sys.exit(1)
