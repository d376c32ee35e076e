"""Plain PySpark: a timer for each page and minute counts the clicks once the minute is over."""

import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import SparkSession, functions
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

source, target = sys.argv[1:]


class CountAtEnd(StatefulProcessor):
    """Counts the clicks of a page and minute, and tells the number when its timer comes."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the state."""
        self._handle = handle
        self._number = handle.getValueState("number", "number long")

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Any,
        timerValues: Any,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Count, and set the timer with the first click."""
        (number,) = self._number.get() or (0,)
        if not number:
            self._handle.registerTimer(int(key[1].timestamp() * 1000) + 60_000)
        self._number.update((number + sum(len(part) for part in rows),))
        return iter(())

    def handleExpiredTimer(  # noqa: N802 - Spark's name
        self,
        key: Any,
        timerValues: Any,  # noqa: N803
        expiredTimerInfo: Any,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Tell the number."""
        (number,) = self._number.get() or (0,)
        self._number.clear()
        yield pd.DataFrame({"page": [key[0]], "minute": [str(key[1])], "clicks": [number]})

    def close(self) -> None:
        """Nothing is left open."""


spark = SparkSession.builder.appName("timers").master("local[2]").getOrCreate()
spark.conf.set("spark.sql.shuffle.partitions", "2")
(
    spark.readStream.schema("at timestamp, user string, page string")
    .option("maxFilesPerTrigger", 1)
    .json(source)
    .withWatermark("at", "1 minute")
    .withColumn("minute", functions.date_trunc("minute", "at"))
    .groupBy("page", "minute")
    .transformWithStateInPandas(
        CountAtEnd(), "page string, minute string, clicks long", "append", "eventTime"
    )
    .writeStream.queryName("enriched")
    .trigger(processingTime="1500 milliseconds")
    .start(f"{target}/enriched")
    .awaitTermination()
)
