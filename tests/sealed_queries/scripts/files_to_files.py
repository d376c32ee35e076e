"""Plain PySpark: files of clicks into files, without state."""

import sys

from pyspark.sql import SparkSession, functions

source, target = sys.argv[1:3]
spark = SparkSession.builder.appName("copy").master("local[2]").getOrCreate()
clicks = spark.readStream.schema("at timestamp, user string, page string")
(
    clicks.option("maxFilesPerTrigger", 1)
    .json(source)
    .withColumn("section", functions.split("page", "/")[1])
    .writeStream.queryName("enriched")
    .trigger(processingTime="1500 milliseconds")
    .start(f"{target}/enriched")
    .awaitTermination()
)
