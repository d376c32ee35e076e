"""Says which rows Spark SQL evaluates between two Python tasks."""

from tidegate.jobs.rules.aggregates import list_spark_arguments
from tidegate.jobs.rules.native_support import explain_unproven_expressions
from tidegate.jobs.spec.pipeline import PipelineSpec

from .column_casts import is_cast_proven
from .cut_division import ReadUnit


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
