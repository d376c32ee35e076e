"""Casts from the columns of objects to the declared types, and the names of system columns.

User columns never start with ``_`` (the spec refuses it), so every inner column does.
"""

import re
from collections.abc import Iterable
from itertools import accumulate

from tidegate.jobs.engine.arrow_tables import ARROW_TYPES
from tidegate.jobs.rules.duck_frame import DuckFrame, Frame
from tidegate.jobs.rules.row_conditions import quote_name, quote_text
from tidegate.jobs.sources.object_decoding import BAD_REASON
from tidegate.jobs.spec.row_rules import EXACT_BITS, FILTERED, accepts_family, build_text_pattern
from tidegate.jobs.spec.source_spec import BarrierColumns, SourceSpec
from tidegate.jobs.spec.table_layout import DeadLetterReason
from tidegate.time_units import TICK_MAX, TIME_BOUND

_ARROW_OF_SPARK = {
    own["spark"]: name for name, own in reversed(ARROW_TYPES.items()) if "spark" in own
}
_Cases = list[tuple[DeadLetterReason, str]]
"""Reasons, and the condition of each as SQL."""
_PLACES = ("_m", "_p", "_o", "_row")
_DECIMAL = re.compile(r"decimal(?:32|64|128|256)\((\d+), ?(-?\d+)\)\Z")
_NESTED = re.compile(r"(struct|list|large_list)<(.*)>\Z")
_DICTIONARY = re.compile(r"dictionary<values=(.+), indices=\w+, ordered=\d>\Z")


def unwrap_dictionary(arrow: str) -> str:
    """The value type of a dictionary-encoded column; any other type as it is."""
    match = _DICTIONARY.match(arrow)
    return match[1] if match else arrow


def is_naive_timestamp(arrow: str) -> bool:
    """Whether the type is a timestamp without a time zone."""
    own = unwrap_dictionary(arrow)
    return own.startswith("timestamp") and "tz=" not in own


def arrow_to_spark_type(arrow: str) -> str | None:
    """The Spark SQL type with the values of this physical column.

    None if no declared type can come from it. Spark reads it with this type, but nanosecond
    timestamps as bigint (`select_readable_columns`).

    >>> [arrow_to_spark_type(kind) for kind in ("timestamp[us]", "uint16", "list<item: int64>")]
    ['timestamp_ntz', 'int', 'array<bigint>']
    >>> arrow_to_spark_type("struct<at: timestamp[us, tz=UTC], tags: list<item: string not null>>")
    'struct<at:timestamp,tags:array<string>>'
    """
    arrow = unwrap_dictionary(arrow)
    if arrow.startswith("timestamp"):
        return "timestamp_ntz" if is_naive_timestamp(arrow) else "timestamp"
    if (match := _DECIMAL.match(arrow)) and int(match[1]) <= 38 and int(match[2]) >= 0:
        return f"decimal({match[1]},{match[2]})"
    if match := _NESTED.match(arrow):
        return _nested_to_spark_type(match[1], match[2])
    return ARROW_TYPES.get(arrow, {}).get("spark")


def _nested_to_spark_type(form: str, inner: str) -> str | None:
    # Fields are separated by commas outside of all brackets.
    depths = accumulate((c in "<[(") - (c in ">])") for c in inner)
    text = "".join("\0" if c == "," and not d else c for c, d in zip(inner, depths, strict=True))
    parts = [field.strip().removesuffix(" not null") for field in text.split("\0")]
    fields = [
        (name, arrow_to_spark_type(kind))
        for name, _, kind in (part.partition(": ") for part in parts)
    ]
    if not all(kind and re.fullmatch(r"\w+", name) for name, kind in fields) or "[ns" in inner:
        return None
    if form != "struct":
        return f"array<{fields[0][1]}>"
    return f"struct<{','.join(f'{name}:{kind}' for name, kind in fields)}>"


def spark_to_arrow_type(own: str) -> str:
    """The physical type that Spark reads as this one: the way back of `arrow_to_spark_type`.

    Any other type is returned as it is.

    >>> [spark_to_arrow_type(kind) for kind in ("bigint", "decimal(6,2)", "timestamp_ntz")]
    ['int64', 'decimal128(6,2)', 'timestamp[us]']
    """
    return (
        own.replace("decimal", "decimal128")
        if own.startswith("decimal")
        else _ARROW_OF_SPARK.get(own, own)
    )


def classify_arrow_type(arrow: str) -> str:
    """The family of a physical type, as `tidegate.jobs.spec.row_rules.accepts_family` has it.

    >>> [classify_arrow_type(kind) for kind in ("uint64", "decimal128(6, 2)", "list<item: int64>")]
    ['int', 'decimal', 'other']
    """
    own = unwrap_dictionary(arrow)
    if own.startswith(("timestamp", "decimal")):
        return re.split(r"\d|\[", own)[0]
    return str(ARROW_TYPES.get(own, {}).get("family", "other"))


def is_nanosecond_timestamp(arrow: str) -> bool:
    """Whether the column is a timestamp of nanoseconds, which Spark reads as plain integers."""
    return unwrap_dictionary(arrow).startswith("timestamp[ns")


def declared_to_spark_type(declared: str) -> str:
    """The Spark SQL type of a declared column type."""
    return re.sub(r"\blong(?=[,>]|\Z)", "bigint", declared.replace(" ", ""))


def cast_never_fails(arrow: str, declared: str) -> bool:
    """Whether every value of the physical type is sure to fit the declared one.

    Then no row can be bad by its types. False does not say that a value does not fit.
    """
    arrow = unwrap_dictionary(arrow)
    if declared == "timestamp":
        return arrow.startswith("timestamp") and not (
            is_naive_timestamp(arrow) or is_nanosecond_timestamp(arrow)
        )
    is_same = arrow_to_spark_type(arrow) == declared_to_spark_type(declared)
    return is_same or declared in ARROW_TYPES.get(arrow, {}).get("fits", ())


_UNPROVEN = {
    "decimal": ("float",),
    "float": ("decimal",),
    "double": ("decimal",),
}
"""Declared type -> families whose digits DuckDB rounds in another way than Spark."""


def is_cast_proven(arrow: str, declared: str, timezone: str | None) -> bool:
    """Whether DuckDB is proven to cast and refuse all values as Spark SQL does."""
    if cast_never_fails(arrow, declared):
        return True
    own, family = unwrap_dictionary(arrow), classify_arrow_type(arrow)
    if "<" in declared or "<" in own:  # DuckDB does not get nested columns
        return False
    if family == "timestamp":
        zoned = is_naive_timestamp(arrow) and timezone is not None
        return not zoned and (declared != "date" or not is_nanosecond_timestamp(arrow))
    if (own, declared) in (("double", "float"), ("string", "binary"), ("large_string", "binary")):
        return False
    return family not in _UNPROVEN.get(declared.partition("(")[0], ())


# From the physical columns of an object to the declared ones, and the verdict on each row's form,
# as Spark SQL.


def select_readable_columns(columns: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(column, Spark type to read), in order, of (column, Arrow type text).

    Columns that no declared type can come from are left out; rows are dead if the spec declares
    such a column.
    """
    known = [(name, arrow_to_spark_type(arrow), arrow) for name, arrow in columns]
    return [
        (name, "bigint" if is_nanosecond_timestamp(arrow) else own)
        for name, own, arrow in known
        if own is not None
    ]


def cast_to_declared(raw: Frame, source: SourceSpec, physical: dict[str, str]) -> Frame:
    """Cast to the schema, filter, select, and judge each row: by its values, time, and the rules.

    Args:
        raw: rows with the columns of `select_readable_columns`, `_m`, `_p`, `_o` and `_row`.
        source: whose rows they are.
        physical: column -> Arrow type text.

    Returns:
        The columns of `select` or the schema, `_time`, `_end` (exclusive, in ticks), `_kind` (null
        if unknown), `_dead`, `_detail`, `_json` (the columns read; in DuckDB null), `_rule`,
        `_warned` and the four places.
    """
    native = isinstance(raw, DuckFrame)
    casts = {
        # DuckDB computes nothing from nested columns, so it does not get them.
        name: "NULL"
        if native and "<" in declared
        else _cast_column_sql(quote_name(name), declared, physical.get(name, ""), source.timezone)
        for name, declared in source.columns.items()
    }
    read = [name for name, _ in select_readable_columns(physical.items())]
    json = f"to_json(struct({', '.join(map(quote_name, read))}))"
    if native:
        json = "CAST(NULL AS string)"  # `row_texts` writes those that are asked for
    unfit, detail = _judge_values_sql(source, physical)
    cast = raw.selectExpr(
        *(f"{sql} AS {quote_name(name)}" for name, sql in casts.items()),
        *(f"{unfit} AS _unfit", f"{detail} AS _detail", f"{json} AS _json"),
        *_PLACES,
    )
    rows = _select_columns(cast, source).selectExpr(
        "*",
        f"{quote_name(source.event_time)} AS _time",
        f"{_end_ticks_sql(source)} AS _end",
        f"{_first_reason_sql(_list_time_faults(source))} AS _fault",
    )
    return _apply_rules(rows, source)


def _select_columns(rows: Frame, source: SourceSpec) -> Frame:
    """The columns of `select` with `_kind`, and in `_unfit` also unknown kinds and filtered rows.

    Of a row that does not fit or is filtered, nothing is selected.
    """
    columns = {name: quote_name(name) for name in source.columns}
    own = [*columns.values(), "_detail", "_json", *_PLACES]
    # A comment in an expression ends with its line. A column may have a word of SQL as its name.
    selected = {
        name: f"IF(_unfit IS NULL, (\n{columns.get(sql.strip(), sql)}\n), NULL)"
        for name, sql in source.select.items()
    }
    kind = _row_kind_sql(source.barriers, selected or columns)
    keep = "true" if source.where is None else f"coalesce((\n{source.where}\n), false)"
    unfit = (
        "coalesce(_unfit, CASE WHEN _kind IS NULL THEN 'bad_value'"
        f" WHEN _kind = 'data' AND NOT {keep} THEN '{FILTERED}' END) AS _unfit"
    )
    judged = rows.selectExpr("*", f"{kind} AS _kind").selectExpr(*own, "_kind", unfit)
    if not selected:
        return judged
    return judged.selectExpr(
        *(f"{sql} AS {quote_name(name)}" for name, sql in selected.items()),
        *("_kind", "_unfit", "_detail", "_json", *_PLACES),
    )


def _apply_rules(rows: Frame, source: SourceSpec) -> Frame:
    """Judge rows that fit and are not filtered by the rules of their source.

    `_rule` is the rule that removes a row, `_warned` the others that it breaks, with commas.
    """
    rules, checked = source.rules, "_unfit IS NULL AND _kind = 'data'"
    broken = {name: f"NOT coalesce((\n{rule.predicate}\n), false)" for name, rule in rules.items()}
    removing = {name: rule.removal_reason for name, rule in rules.items() if rule.removal_reason}
    first = _first_reason_sql([(name, f"{checked} AND {broken[name]}") for name in removing])
    warning = ", ".join(
        f"CASE WHEN {broken[name]} THEN '{name}' END" for name in rules if name not in removing
    )
    warned = f"CASE WHEN {checked} AND _rule IS NULL THEN concat_ws(',', {warning}) END"
    reason = _first_reason_sql([(reason, f"_rule = '{name}'") for name, reason in removing.items()])
    details = [(f"rule {n}: {r.predicate}", f"_rule = '{n}'") for n, r in rules.items()]
    return rows.selectExpr("*", f"{first} AS _rule").selectExpr(
        *map(quote_name, source.row_columns),
        *("_time", "_end", "_kind", "_json", "_rule", *_PLACES),
        f"coalesce(_unfit, {reason}, _fault) AS _dead",
        f"coalesce({_first_reason_sql(details)}, _detail) AS _detail",
        f"{warned if warning else 'CAST(NULL AS string)'} AS _warned",
    )


def _first_reason_sql(cases: Iterable[tuple[str, str]]) -> str:
    """The reason of the first condition that holds, as SQL; null if none does."""
    found = " ".join(f"WHEN {condition} THEN {quote_text(reason)}" for reason, condition in cases)
    return f"CASE {found} END" if found else "CAST(NULL AS string)"


def cast_with_check_sql(
    column: str, declared: str, arrow: str, timezone: str | None
) -> tuple[str, str | None]:
    """Return the cast of a physical value to the declared type, and when it does not fit.

    The condition is None if every value fits.
    """
    cast = _cast_column_sql(column, declared, arrow, timezone)
    is_local = is_naive_timestamp(arrow) and declared == "timestamp"
    if is_local and timezone is not None:
        return cast, _skipped_time_sql(column, cast, arrow, timezone)
    if is_local or arrow_to_spark_type(arrow) is None:
        return cast, f"{column} IS NOT NULL"
    is_time = declared == "timestamp" and unwrap_dictionary(arrow).startswith("timestamp")
    if is_time or cast_never_fails(arrow, declared):
        return cast, None
    lossy = _lossy_cast_sql(column, cast, arrow, declared)
    return cast, f"{column} IS NOT NULL AND ({cast} IS NULL{lossy})"


def _cast_column_sql(column: str, declared: str, arrow: str, timezone: str | None) -> str:
    """The cast of a column; `arrow` is empty if an object lacks it."""
    target, own = declared_to_spark_type(declared), arrow_to_spark_type(arrow)
    if declared == "timestamp":
        return _cast_timestamp_sql(column, arrow, timezone)
    if own == target:
        return column
    if own is None or not accepts_family(declared, classify_arrow_type(arrow)):
        return f"CAST(NULL AS {target})"
    # In ANSI mode a cast that fails ends the job; a value that does not fit must only end its row.
    return f"{'CAST' if cast_never_fails(arrow, declared) else 'try_cast'}({column} AS {target})"


def _cast_timestamp_sql(column: str, arrow: str, timezone: str | None) -> str:
    """Only timestamps become timestamps: a number has no unit, and a text no agreed zone."""
    if not unwrap_dictionary(arrow).startswith("timestamp") or (
        is_naive_timestamp(arrow) and timezone is None
    ):
        return "CAST(NULL AS timestamp)"
    value = _whole_micros_sql(column, arrow)
    return (
        f"to_utc_timestamp(CAST({value} AS timestamp), '{timezone}')"
        if is_naive_timestamp(arrow)
        else value
    )


def _whole_micros_sql(column: str, arrow: str) -> str:
    if not is_nanosecond_timestamp(arrow):
        return column
    # `div` rounds towards zero; times before 1970 have to be rounded down.
    return f"timestamp_micros(({column} - pmod({column}, 1000L)) div 1000L)"


def _skipped_time_sql(column: str, cast: str, arrow: str, timezone: str) -> str:
    """The condition under which the zone has no such local time: another one comes back.

    Spark takes the earlier instant of a local time that occurs twice.
    """
    local = f"CAST({_whole_micros_sql(column, arrow)} AS timestamp)"
    return f"{column} IS NOT NULL AND from_utc_timestamp({cast}, '{timezone}') <> {local}"


def _end_ticks_sql(source: SourceSpec) -> str:
    """Exclusive end in ticks; a point event lasts one."""
    # One tick after TICK_MAX would overflow.
    point = f"least(unix_micros({quote_name(source.event_time)}), {TICK_MAX - 1}L) + 1L"
    if source.end_time is None:
        return point
    return f"coalesce(unix_micros({quote_name(source.end_time)}), {point})"


def _row_kind_sql(barriers: BarrierColumns | None, columns: dict[str, str]) -> str:
    if barriers is None:
        return "'data'"
    # Of any type: a number would not be compared with the text of a kind.
    column = f"CAST({columns[barriers.kind]} AS string)"
    types = ", ".join(quote_text(t) for t in barriers.types)
    cases = [f"WHEN {column} IS NULL OR {column} = {quote_text(barriers.data)} THEN 'data'"]
    if barriers.punctuation is not None:
        cases.append(f"WHEN {column} = {quote_text(barriers.punctuation)} THEN 'punctuation'")
    if types:
        cases.append(f"WHEN {column} IN ({types}) THEN 'barrier'")
    return f"CASE {' '.join(cases)} END"


def _judge_values_sql(source: SourceSpec, physical: dict[str, str]) -> tuple[str, str]:
    """Why the values of a row do not fit, and the column to blame, as far as one is to blame.

    These reasons come before those of the time, which they may explain.
    """
    bad: dict[str, str] = {}
    naive: _Cases = []
    skipped: dict[str, str] = {}
    for name, declared in source.columns.items():
        arrow = physical.get(name)
        if arrow is None:
            continue
        _, unfit = cast_with_check_sql(quote_name(name), declared, arrow, source.timezone)
        if arrow_to_spark_type(arrow) is None:  # then the column is not read
            bad[name] = "true"
        elif unfit is None:
            continue
        elif declared != "timestamp" or not is_naive_timestamp(arrow):
            bad[name] = unfit
        elif source.timezone is None:
            naive.append(("naive_time", unfit))
        else:
            skipped[name] = unfit
    cases: _Cases = [("bad_value", condition) for condition in (bad | skipped).values()]
    names = [(f"{n} is {physical[n]}, declared {source.columns[n]}", c) for n, c in bad.items()]
    names += [(f"{n} is a local time that {source.timezone} skips", c) for n, c in skipped.items()]
    details = [_first_reason_sql(names), quote_text(source.event_time)]
    if BAD_REASON in physical:  # a decoded object: what it says of a row comes first
        cases.append(("bad_value", f"{BAD_REASON} IS NOT NULL"))
        details.insert(0, BAD_REASON)
    return _first_reason_sql([*cases, *naive]), f"coalesce({', '.join(details)})"


def _lossy_cast_sql(column: str, cast: str, arrow: str, declared: str) -> str:
    """What besides a cast that fails makes a value unfit.

    `try_cast` cuts, rounds and trims without a word.
    """
    family, form = classify_arrow_type(arrow), build_text_pattern(declared)
    if not accepts_family(declared, family):
        return ""
    if family == "string" and form is not None:
        whole = quote_text(rf"\A(?:{form})\z")
        return f" OR NOT {column} RLIKE {whole}"
    # Cast back and compared: so a fraction that was cut off shows.
    exact = declared in ("int", "long") or declared.startswith("decimal")
    if exact and family in ("float", "decimal"):
        if family == "decimal":  # as its own type: two decimals lose digits to be compared
            back = f"try_cast({cast} AS {arrow_to_spark_type(arrow)})"
            return f" OR coalesce({back} <> {column}, true)"
        # Spark makes the greatest long of two to the 63rd, which is one more.
        lost = f" OR {column} >= CAST('{2**63}' AS double)" if declared == "long" else ""
        return f" OR CAST({cast} AS {arrow_to_spark_type(arrow)}) <> {column}{lost}"
    if family == "int" and declared in EXACT_BITS:
        return f" OR abs(CAST({column} AS decimal(20,0))) > {2 ** EXACT_BITS[declared]}L"
    return ""


def _list_time_faults(source: SourceSpec) -> _Cases:
    """Faults of the event time; a barrier row needs none."""
    time, data = quote_name(source.event_time), "_kind = 'data'"
    far = f"unix_micros({time}) NOT BETWEEN -{TIME_BOUND}L AND {TIME_BOUND}L"
    cases: _Cases = [
        ("no_event_time", f"{time} IS NULL AND {data}"),
        ("bad_value", f"{time} IS NULL AND _kind = 'punctuation'"),
        (
            "bad_value",
            f"{data} AND {far}",
        ),
    ]
    if source.min_event_time is not None:
        least = f"timestamp_micros({source.min_event_time}L)"
        cases.append(("before_min_event_time", f"{data} AND {time} < {least}"))
    if source.end_time is not None:
        end = quote_name(source.end_time)
        bad = f"{end} <= {time} OR unix_micros({end}) > {TIME_BOUND}L"
        cases.append(("bad_value", f"{data} AND ({bad})"))
    return cases
