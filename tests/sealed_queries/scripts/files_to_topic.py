"""Plain PySpark: files of clicks into a Kafka topic, without state."""

import sys

from pyspark.sql import SparkSession, functions

source, servers, topic = sys.argv[1:4]
spark = SparkSession.builder.appName("publish").master("local[2]").getOrCreate()
clicks = spark.readStream.schema("at timestamp, user string, page string")
(
    clicks.option("maxFilesPerTrigger", 1)
    .json(source)
    .select(functions.to_json(functions.struct("at", "page")).alias("value"))
    .writeStream.queryName("published")
    .format("kafka")
    .option("kafka.bootstrap.servers", servers)
    .option("topic", topic)
    .start()
    .awaitTermination()
)
