"""What the script imports from beside itself."""

from pyspark.sql import DataFrame, SparkSession


def read_clicks(spark: SparkSession, source: str) -> DataFrame:
    """Read the clicks, a file in a batch."""
    clicks = spark.readStream.schema("at timestamp, user string, page string")
    return clicks.option("maxFilesPerTrigger", 1).json(source)
