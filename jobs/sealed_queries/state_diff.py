"""Compares the rows of state of two sealed batches, as Spark's own state reader gives them.

The checkpoints of both batches are fetched into a temporary folder. Spark's data sources
``state-metadata`` and ``statestore`` (4.1.3) read them there, with the state store that the query
has used. Rows become JSON texts, because keys and values of a state may have any type.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.checkpoints.batch_notes import BatchNotes
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.record_models import FrozenModel
from tidegate.checkpoints.store import Store

from .batch_objects import restore_files, select_objects
from .checkpoint_files import replace_schema_paths
from .errors import STATE_UNREADABLE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_JOIN = "symmetricHashJoin"
_WITH_VARIABLES = "transformWithState"
_KEYS = ("key", "user_map_key")  # of a map that a query keeps per key
_LONGEST_TEXT = 1000  # characters of a key or value that is shown
# Without these Spark writes milliseconds, and two instants of one millisecond would be equal.
_INSTANTS = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


class StateExample(FrozenModel):
    """A key whose rows differ; texts are JSON, cut off after 1,000 characters.

    Attributes:
        change: added, removed or changed.
        key: the key.
        left, right: the values of each side, sorted; None where the key has none.
    """

    change: str
    key: str
    left: str | None
    right: str | None


class OperatorDifference(FrozenModel):
    """What differs in one part of a query's state.

    Attributes:
        query: its name.
        operator: number and name of the stateful operator in Spark's plan.
        part: side of a join, or variable of `transformWithState`; None for other operators.
        added, removed, changed: numbers of keys. A join may keep several rows of one key.
        examples: the first keys of each change.
    """

    query: str
    operator: str
    part: str | None
    added: int
    removed: int
    changed: int
    examples: tuple[StateExample, ...]


def compare_states(
    session: SparkSession, store: Store, left: Manifest, right: Manifest, examples: int
) -> Iterator[OperatorDifference]:
    """Yield what differs in each part of the state of two checkpoints of a job, also if nothing.

    A query that has the same objects in both is left out.

    Args:
        session: a classic session. Its time zone is that of the shown instants.
        store: the bucket.
        left: manifest of one checkpoint.
        right: manifest of the other.
        examples: keys to show for each change of a part, at most.

    Raises:
        ConfigurationError: Spark cannot read a state.
        PoisonError: an object of a checkpoint is damaged or missing.
    """
    from tidegate.jobs.spark.spark_session import SPARK_ERRORS, extract_cause

    # Its manager of queries registers what state stores report to; without it no state can be read.
    session.streams.active  # noqa: B018
    batches = [_list_batches(one) for one in (left, right)]
    for query in sorted({*batches[0], *batches[1]}):
        objects = [select_objects(one.segments, query) for one in (left, right)]
        if objects[0] == objects[1]:
            continue
        with tempfile.TemporaryDirectory(prefix="tidegate-states-") as place:
            sides = []
            for number, segments in enumerate(objects):
                folder, batch = Path(place) / str(number), batches[number].get(query)
                if batch is not None:
                    restore_files(store, query, segments, folder)
                    replace_schema_paths(folder, str(folder))
                sides.append((folder, batch))
            try:
                yield from _compare_query(session, query, sides, examples)
            except (*SPARK_ERRORS, LookupError) as error:
                raise STATE_UNREADABLE(
                    pipeline=left.pipeline, query=query, text=extract_cause(error)[:300]
                ) from error


def _list_batches(manifest: Manifest) -> dict[str, int]:
    """Query -> its newest sealed batch."""
    notes = BatchNotes.from_manifest(manifest)
    return {name: at.batch for name, at in notes.queries.items()} if notes else {}


def _compare_query(
    session: SparkSession, query: str, sides: list[tuple[Path, int | None]], examples: int
) -> Iterator[OperatorDifference]:
    left, right = (
        {} if batch is None else dict(_read_operators(session, folder, batch))
        for folder, batch in sides
    )
    for operator, part in sorted({*left, *right}, key=str):
        frames = [side.get((operator, part)) for side in (left, right)]
        found = _compare_frames(frames, examples)
        yield OperatorDifference(query=query, operator=operator, part=part, **found)


def _read_operators(
    session: SparkSession, folder: Path, batch: int
) -> Iterator[tuple[tuple[str, str | None], DataFrame]]:
    """Yield number and name of each operator, its part, and the frame of its rows."""
    at = {"path": str(folder), "batchId": str(batch)}
    known = session.read.format("state-metadata").options(**at).load().collect()
    operators = {(one.operatorId, one.operatorName): one.operatorProperties for one in known}
    if not operators and any((folder / "state").glob("*/*/*")):
        raise LookupError("the checkpoint does not describe its operators, as Spark 4 does")
    for (number, name), properties in operators.items():
        for part, options in _list_parts(name, properties):
            reader = session.read.format("statestore").options(**at, operatorId=number, **options)
            yield (f"{number} {name}", part), _read_as_texts(reader.load())


def _list_parts(
    operator: str, properties: str | None
) -> Iterator[tuple[str | None, dict[str, str]]]:
    """Yield the parts of an operator's state, each with the options that select it."""
    if operator == _JOIN:
        yield from ((side, {"joinSide": side}) for side in ("left", "right"))
    elif operator.startswith(_WITH_VARIABLES):
        names = [one["stateName"] for one in json.loads(properties or "{}")["stateVariables"]]
        # Spark keeps timers in variables of its own.
        own = (name for name in names if not name.startswith("$"))
        yield from ((name, {"stateVarName": name}) for name in own)
    else:
        yield None, {}


def _read_as_texts(state: DataFrame) -> DataFrame:
    """Return a row per key, with all its values as one text."""
    from pyspark.sql import functions

    def write(names: list[str]) -> Any:
        """The columns as one JSON text, field by field: a row of a join has more than its type."""
        parts = [
            functions.struct(
                *(f"`{name}`.`{field}`" for field in state.select(f"{name}.*").columns)
            )
            for name in names
        ]
        column = parts[0] if len(parts) == 1 else functions.struct(*parts)
        return functions.to_json(column, _INSTANTS)

    keys = [name for name in state.columns if name in _KEYS]
    values = [name for name in state.columns if name not in (*_KEYS, "partition_id")]
    texts = state.select(write(keys).alias("key"), write(values).alias("value"))
    listed = functions.sort_array(functions.collect_list("value"))
    return texts.groupBy("key").agg(functions.concat_ws(",", listed).alias("values"))


def _compare_frames(frames: list[DataFrame | None], examples: int) -> dict[str, Any]:
    """Return the fields of `OperatorDifference` that a comparison gives; None: no state."""
    from pyspark.sql import Window, functions
    from pyspark.sql.functions import col

    present = [frame for frame in frames if frame is not None]
    left, right = (present[0].limit(0) if one is None else one for one in frames)
    both = left.withColumnRenamed("values", "left").join(
        right.withColumnRenamed("values", "right"), "key", "full_outer"
    )
    change = (
        functions.when(col("left").isNull(), "added")
        .when(col("right").isNull(), "removed")
        .when(col("left") != col("right"), "changed")
    )
    found = both.withColumn("change", change).where("change IS NOT NULL").persist()
    counts = {row["change"]: row["count"] for row in found.groupBy("change").count().collect()}
    order = functions.row_number().over(Window.partitionBy("change").orderBy("key"))
    cut = [functions.substring(t, 1, _LONGEST_TEXT).alias(t) for t in ("key", "left", "right")]
    rows = found.withColumn("number", order).where(col("number") <= examples)
    shown = [
        StateExample(**row.asDict())
        for row in rows.orderBy("change", "number").select("change", *cut).collect()
    ]
    found.unpersist()
    return {
        "examples": tuple(shown),
        **{name: counts.get(name, 0) for name in ("added", "removed", "changed")},
    }
