"""Plain PySpark with arguments, a package, a file of settings, a log, and a module called `errors`."""

import argparse
import json
import logging
from pathlib import Path

import errors  # type: ignore[import-not-found]
from helpers import read_clicks  # type: ignore[import-not-found]
from pyspark.sql import SparkSession, functions

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
parser = argparse.ArgumentParser()
parser.add_argument("--source", required=True)
parser.add_argument("--target", required=True)
options = parser.parse_args()
try:
    settings = json.loads(Path("settings.json").read_text())
except FileNotFoundError as error:
    raise errors.NoSettingsError from error
logging.info("every %s", settings["every"])

spark = SparkSession.builder.appName("packaged").master("local[2]").getOrCreate()
spark.sparkContext.addPyFile(settings["module"])


def find_section(page: str) -> str:
    """Import the module where the rows are: in a process of Spark."""
    import sections  # type: ignore[import-not-found]

    return str(sections.find_section(page))


(
    read_clicks(spark, options.source)
    .withColumn("section", functions.udf(find_section)("page"))
    .writeStream.queryName("enriched")
    .trigger(processingTime=settings["every"])
    .start(f"{options.target}/enriched")
    .awaitTermination()
)
