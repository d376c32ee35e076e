"""Says which pipelines and cuts are read by Spark's Python tasks, and why others are not yet."""

from tidegate.checkpoints.store import Store
from tidegate.jobs.rules.aggregates import list_spark_arguments
from tidegate.jobs.rules.native_support import explain_unproven_expressions
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.source_spec import SourceSpec

from .column_casts import is_cast_proven
from .cut_division import ReadUnit
from .slice_scan import MOST_CELLS
from .topic_reading import explain_other_topic


def explain_other_rows(spec: PipelineSpec, store: Store | None = None) -> str | None:
    """Why the rows of a pipeline do not go through Python tasks; None if they do.

    Without `store` it is taken to be a bucket or a folder.
    """
    if spec.release.glom is not None:
        return "release.glom"
    if store is not None and (
        not store.url.startswith(("s3://", "file://")) or " over " in store.url
    ):
        return "a store that tasks cannot open"
    for name, source in spec.sources.items():
        if (reason := _explain_source(source)) is not None:
            return f"source {name}: {reason}"
        if source.kafka is not None and uses_connect(spec):
            return f"source {name}: a topic whose settings a Spark Connect server does not have"
    return None


def _explain_source(source: SourceSpec) -> str | None:
    if source.kafka is not None and (reason := explain_other_topic(source)) is not None:
        return reason
    if source.kind not in ("objects", "kafka") or source.table is not None:
        return "neither objects nor a topic"
    return None


def explain_other_cut(spec: PipelineSpec, units: list[ReadUnit]) -> str | None:
    """Why Spark SQL reads a cut of a pipeline for which `explain_other_rows` has no reason."""
    if any(unit.count_cells(spec) > MOST_CELLS for unit in units):
        return "a slice with more values than a task holds"
    if uses_connect(spec):
        # Only a classic session has a place between two Python tasks.
        return explain_spark_expressions(spec, units)
    return None


def explain_spark_expressions(spec: PipelineSpec, units: list[ReadUnit]) -> str | None:
    """Why Spark SQL evaluates the rows of a cut between two Python tasks; None if it has not to."""
    if (reason := explain_unproven_expressions(spec)) is not None:
        return reason
    if list_spark_arguments(spec):
        return "the argument of an aggregate"
    for unit in units:
        for piece in unit.cut.slices:
            source = spec.sources[piece.member.source]
            for part in piece.parts:
                for name, declared in source.columns.items():
                    arrow = part["columns"].get(name, "null")
                    if not is_cast_proven(arrow, declared, source.timezone):
                        return f"column {name} is {arrow}, declared {declared}"
    return None


def uses_connect(spec: PipelineSpec) -> bool:
    """Whether Spark is reached through Spark Connect."""
    return spec.spark.master.startswith("sc://")
