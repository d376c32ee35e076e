"""Plain PySpark: files of clicks into files, with the checkpoint at an address that is given."""

import sys

from pyspark.sql import SparkSession

source, target, checkpoint = sys.argv[1:]
spark = SparkSession.builder.appName("move").master("local[2]").getOrCreate()
clicks = spark.readStream.schema("at timestamp, user string, page string")
(
    clicks.option("maxFilesPerTrigger", 1)
    .json(source)
    .writeStream.queryName("enriched")
    .option("checkpointLocation", checkpoint)
    .trigger(availableNow=True)
    .start(f"{target}/enriched")
    .awaitTermination()
)
