"""Plain PySpark: a cast that fails on bad data, and a script that only looks whether the query goes on."""

import sys
import time

from pyspark.sql import SparkSession, functions

source, target = sys.argv[1:]
spark = SparkSession.builder.appName("prices").master("local[2]").getOrCreate()
query = (
    spark.readStream.schema("id long, price string")
    .option("maxFilesPerTrigger", 1)
    .json(source)
    .select("id", functions.col("price").cast("decimal(9, 2)"))
    .writeStream.queryName("enriched")
    .trigger(processingTime="1500 milliseconds")
    .start(f"{target}/enriched")
)
while query.isActive:
    time.sleep(0.1)
