"""Says which outputs the driver computes in DuckDB, and why Spark SQL has to compute the others.

Native is only what tests have shown to be equal in both engines (`make agreement`). Of the
expressions of `select`, `where` and the rules that is the forms below; for all others the reason
for Spark SQL is given.
"""

import re
from functools import lru_cache
from typing import Any

from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.table_layout import ColumnTypes

from .aggregates import explain_spark_aggregate
from .duck_frame import ENGINE_ERRORS, open_database, to_duckdb


def explain_unproven_expressions(spec: PipelineSpec) -> str | None:
    """Why Spark SQL evaluates `select`, `where` and rules of a pipeline; None if it has not to."""
    found = {name: _explain_spark_source(source) for name, source in spec.sources.items()}
    return next((f"source {name}: {reason}" for name, reason in found.items() if reason), None)


def explain_spark_aggregates(spec: PipelineSpec) -> str | None:
    """Why Spark SQL computes an aggregate of a pipeline, or its argument; None if it has not to."""
    for name, window in spec.windows.items():
        for what in window.aggregates.values():
            if (reason := explain_spark_aggregate(what, spec.columns)) is not None:
                return f"window {name}: {reason}"
    return None


# Expressions of `select`, `where` and the rules.

_FAMILIES = {"int": "whole", "long": "whole"}
# 32-bit floats and decimals are compared with literals by rules that differ.
_COMPARABLE = ("whole", "double", "string", "boolean", "date", "timestamp")
# A length has 32 bits in Spark SQL and 64 in DuckDB, so sums of it may overflow in one of them.
_NUMBERS = frozenset({"whole", "length", "double", "fraction"})
# Of the text itself: sqlglot reads them, but they mean something else to one of the engines.
_FOREIGN = ('"', "--", "/*", "\\", "!", "==", "{")


class _UnprovenError(Exception):
    """The form that is not known to be equal."""


@lru_cache(1024)
def _explain_expression(
    sql: str, columns: tuple[tuple[str, str], ...], wanted: str | None
) -> str | None:
    import sqlglot

    known = dict(columns)
    if sql.strip("` ") in known and wanted is None:
        return None
    try:
        if any(sign in sql for sign in _FOREIGN):
            raise _UnprovenError(sql)
        tree = sqlglot.parse_one(sql, read="spark")
        if wanted is None:
            tree = _strip_proven_cast(tree, known)
        family = _infer_family(tree, known)
        with open_database(for_frames=True) as db:  # a column may have a word of DuckDB as its name
            db.extract_statements(f"SELECT ({to_duckdb(sql)})")
        return None if wanted in (None, family) else f"{sql} is not of type {wanted}"
    except (sqlglot.errors.SqlglotError, *ENGINE_ERRORS):
        return f"{sql} is not proven equal in DuckDB"
    except _UnprovenError as error:
        return f"{error} is not proven equal in DuckDB"


def _strip_proven_cast(tree: Any, columns: ColumnTypes) -> Any:
    """What is cast, where the cast keeps every value: to the same type, or to a wider number."""
    from sqlglot import exp

    if not isinstance(tree, exp.Cast):
        raise _UnprovenError(tree.sql("spark"))
    family = _infer_family(tree.this, columns)
    kind = tree.to.sql("spark").lower()
    wider = dict.fromkeys(("whole", "length"), ("bigint", "double"))
    if kind not in wider.get(family, (family,)):
        raise _UnprovenError(tree.sql("spark"))
    return tree.this


def _infer_family(node: Any, columns: ColumnTypes) -> str:
    """The family of a value whose form is proven.

    Raises:
        _UnprovenError: it is not.
    """
    from sqlglot import exp

    if not (operands := _list_operands(node)):
        return _infer_leaf(node, columns)
    inner = [_infer_family(one, columns) for one in operands]
    alike = {family for family in inner if family != "null"}
    compared = exp.EQ | exp.NEQ | exp.GT | exp.GTE | exp.LT | exp.LTE | exp.NullSafeEQ
    compared |= exp.Between | exp.In
    if isinstance(node, compared | exp.Is):
        _require_same_reading(operands, compared | exp.Is | exp.Not)
    # Spark compares each bound as itself, and DuckDB all three numbers as doubles.
    mixed = isinstance(node, exp.Between) and inner[0] == "whole" and "double" in alike
    forms = [
        (exp.Paren, True, inner[0]),
        (exp.Neg, inner[0] in _NUMBERS, inner[0]),
        (exp.And | exp.Or | exp.Not, alike <= {"boolean"}, "boolean"),
        (exp.Is, inner[-1] == "null", "boolean"),
        (compared, len(alike) == 1 or (alike <= _NUMBERS and not mixed), "boolean"),
        (exp.Add | exp.Sub | exp.Mul, alike <= {"whole"}, "whole"),
        (exp.Add | exp.Sub | exp.Mul, alike <= {"whole", "double"}, "double"),
        # By zero Spark fails, and DuckDB gives null.
        (exp.Mod, alike == {"whole"} and _is_positive(node.args.get("expression")), "whole"),
        (exp.Length, alike == {"string"}, "length"),
        (exp.Coalesce, len(alike) == 1 and "fraction" not in alike, min(alike, default="")),
    ]
    known = (family for form, proven, family in forms if isinstance(node, form) and proven)
    return next(known, None) or _refuse_form(node)


def _require_same_reading(operands: list[Any], compared: Any) -> None:
    """Refuse what the engines read, or overflow, in different ways.

    Of `a = b in (c)` Spark SQL takes `=` first and DuckDB `in`; of `a <=> b = c` DuckDB takes `=`
    first. `a + 1 > 5` is `a > 4` in DuckDB, and does not overflow.
    """
    from sqlglot import exp

    summed = [one for one in operands if isinstance(one.unnest(), exp.Add | exp.Sub | exp.Mul)]
    fixed = [one for one in operands if not list(one.find_all(exp.Column))]
    for one in operands:
        # sqlglot adds brackets to `<=>`.
        unlike = isinstance(one, compared) or isinstance(one.unnest(), exp.NullSafeEQ)
        if unlike or (fixed and one in summed):
            _refuse_form(one.parent)


def _infer_leaf(node: Any, columns: ColumnTypes) -> str:
    from sqlglot import exp

    if isinstance(node, exp.Column) and not node.table and node.name in columns:
        family = _FAMILIES.get(columns[node.name], columns[node.name])
        return family if family in _COMPARABLE else _refuse_form(node)
    if isinstance(node, exp.Boolean | exp.Null):
        return "boolean" if isinstance(node, exp.Boolean) else "null"
    if not isinstance(node, exp.Literal) or node.is_string:
        return "string" if isinstance(node, exp.Literal) else _refuse_form(node)
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", node.name):
        _refuse_form(node)
    return "whole" if node.is_int else "fraction"


def _is_positive(node: Any) -> bool:
    return bool(node is not None and node.is_int and node.name.strip("0"))


def _list_operands(node: Any) -> list[Any]:
    """The values inside a form; those of forms that are not known are not looked at."""
    from sqlglot import exp

    if isinstance(node, exp.In):
        # A list; a subquery is refused.
        return [node.this, *node.expressions] if node.expressions else []
    if isinstance(node, exp.Between):
        return [node.this, node.args["low"], node.args["high"]]
    if isinstance(node, exp.Binary):
        return [node.left, node.right]
    if isinstance(node, exp.Coalesce):
        return [node.this, *node.expressions]
    return [node.this] if isinstance(node, exp.Unary | exp.Length) else []


def _refuse_form(node: Any) -> str:
    raise _UnprovenError(node.sql("spark"))


def explain_spark_condition(sql: str, columns: ColumnTypes) -> str | None:
    """Why Spark SQL has to judge a condition; None if DuckDB is proven to give the same."""
    return _explain_expression(sql, tuple(columns.items()), "boolean")


def explain_spark_value(sql: str, columns: ColumnTypes) -> str | None:
    """Why Spark SQL has to compute a column of `select`; None if DuckDB is proven to."""
    return _explain_expression(sql, tuple(columns.items()), None)


def _explain_spark_source(source: SourceSpec) -> str | None:
    """Why Spark SQL has to filter, select or judge the rows of a source; None if it has not."""
    reasons = [explain_spark_value(sql, source.columns) for sql in source.select.values()]
    if source.where is not None:
        reasons.append(explain_spark_condition(source.where, source.columns))
    rules = source.rules.values()
    reasons += [explain_spark_condition(rule.predicate, source.row_columns) for rule in rules]
    return next((reason for reason in reasons if reason is not None), None)
