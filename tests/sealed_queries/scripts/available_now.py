"""Plain PySpark: what is there now, as a cron job reads it; a click takes a while."""

import sys
import time

from pyspark.sql import SparkSession, functions

source, target = sys.argv[1:]


@functions.udf
def find_section(page: str) -> str:
    """Take so long that a batch can be disturbed."""
    time.sleep(0.02)
    return page.split("/")[1]


spark = SparkSession.builder.appName("cron").master("local[2]").getOrCreate()
(
    spark.readStream.schema("at timestamp, user string, page string")
    .option("maxFilesPerTrigger", 1)
    .json(source)
    .withColumn("section", find_section("page"))
    .writeStream.queryName("enriched")
    .trigger(availableNow=True)
    .start(f"{target}/enriched")
    .awaitTermination()
)
