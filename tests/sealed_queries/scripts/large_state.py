"""Plain PySpark: each number of the input adds rows of random text to the state, a megabyte each."""

import sys

from pyspark.sql import SparkSession, functions

(source,) = sys.argv[1:]
spark = SparkSession.builder.appName("large").master("local[2]").getOrCreate()
spark.conf.set("spark.sql.shuffle.partitions", "4")
numbers = spark.readStream.schema("number long").option("maxFilesPerTrigger", 1).json(source)
(
    numbers.select(
        functions.explode(
            functions.sequence(
                functions.expr("number * 1000"), functions.expr("number * 1000 + 999")
            )
        ).alias("id")
    )
    .withColumn("text", functions.randstr(functions.lit(1000), functions.lit(7)))
    .groupBy("id")
    .agg(functions.max("text"))
    .writeStream.queryName("large")
    .format("noop")
    .outputMode("update")
    .start()
    .awaitTermination()
)
