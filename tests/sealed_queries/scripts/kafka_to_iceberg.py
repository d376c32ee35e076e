"""Plain PySpark: clicks from a topic, counted per minute, into an Iceberg table."""

import sys

from pyspark.sql import SparkSession, functions

servers, topic, rows = sys.argv[1:4]
spark = SparkSession.builder.appName("windows").master("local[2]").getOrCreate()
spark.conf.set("spark.sql.shuffle.partitions", "2")
spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.db")
clicks = (
    spark.readStream.format("kafka")
    .option("kafka.bootstrap.servers", servers)
    .option("subscribe", topic)
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", rows)
    .load()
    .select(
        functions.from_json(
            functions.col("value").cast("string"), "at timestamp, page string"
        ).alias("c")
    )
    .select("c.*")
    .withWatermark("at", "1 minute")
)
(
    clicks.groupBy(functions.window("at", "1 minute"), "page")
    .agg(functions.count("*").alias("clicks"))
    .select(functions.col("window.start").alias("minute"), "page", "clicks")
    .writeStream.queryName("windows")
    .trigger(processingTime="1500 milliseconds")
    .format("iceberg")
    .outputMode("append")
    .toTable("lake.db.windows")
    .awaitTermination()
)
