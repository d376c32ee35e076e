"""`tidegate validate`: every mistake that a person makes is named, once, at its line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from tests.cli.conftest import Cli

from tidegate.errors import ConfigurationError
from tidegate.jobs.driver.spec_checks import judge_with_spark, require_no_mistakes
from tidegate.jobs.spec.loader import list_spec_warnings, load_any_spec, parse_spec
from tidegate.jobs.spec.pipeline import PipelineSpec

SHOP = """\
apiVersion: tidegate/v1
name: shop
sources:
  web: &shop
    path: inbox/web/
    schema: {at: timestamp, item: string, amount: double}
    event_time: at
    lag: 30s
    max_jump: 1d
  store: {<<: *shop, path: inbox/store/}
  phone: {<<: *shop, path: inbox/phone/}
windows:
  hourly:
    kind: tumbling
    size: 1h
    keys: [item]
    aggregates: {n: count(*), total: sum(amount)}
"""

MISTAKES = {
    # replaced text: (replacement, what is said)
    "at: timestamp, item": (
        "at: long, item",
        "shop.yaml:7: sources.web: event_time: column 'at' must be a timestamp, not long",
    ),
    "lag: 30s": ("lag: 30", "shop.yaml:8: sources.web.lag: a duration needs a unit"),
    "event_time: at": ("event_time: att", "shop.yaml:7: sources.web: event_time: column 'att'"),
    "at: timestamp": (
        "att: timestamp",
        "column 'at' is not in the schema (att, item, amount), did you mean 'att'?",
    ),
    "keys: [item]": (
        "keys: [itm]",
        "shop.yaml:16: windows.hourly.keys: no column itm in the schema (or '_source'),"
        " did you mean 'item'?",
    ),
    "name: shop": ("name: shop\npreset: flnik", "found 'flnik', did you mean 'flink'?"),
    "n: count(*)": ("n: median(amount)", "the median is approx_quantile(EXPRESSION, 0.5)"),
    "n: count(*), total: sum(amount)": (
        "n: 'top(amount'",
        "a comma ends a value; write it in quotes",
    ),
    "windows:\n  hourly:": (
        "outputs: {format: delta}\nwindows:\n  hourly:",
        "outputs.format: unknown field: tidegate writes Iceberg tables by itself, and no Delta",
    ),
    "windows:\n  hourly:\n": (
        "sinks: {d: {kind: delta, path: x}}\nwindows:\n  hourly:\n",
        "sinks.d: tidegate writes Iceberg tables by itself, and no Delta",
    ),
    "sum(amount)": (
        "max(amont)",
        "shop.yaml:17: windows.hourly.aggregates.total: no column 'amont', did you mean 'amount'?",
    ),
    "total: sum(amount)": (
        "total: sum(item)",
        "windows.hourly.aggregates.total: item is of type string, not a number",
    ),
    "    path: inbox/web/": ("    path: gs://lake/web/", "Google Cloud Storage is not supported"),
    "path: inbox/store/": ("path: 'abfss://lake/web/'", "Azure storage is not supported"),
    "    lag: 30s\n": ("    lag: 30s\n    format: delta\n", "write table: {format: delta} beside"),
    "    size: 1h\n": ("    size: 1h\n    allowed_lateness: 1h\n", "write 'lateness'"),
    "    keys: [item]\n": (
        "    keys: [item]\n    filter: amount > 0\n",
        "windows.hourly.filter: unknown field: 'where' of a source leaves rows out",
    ),
    "    kind: tumbling\n": (
        "    kind: tumbling\n    derived: {a: amount}\n",
        "windows.hourly.derived: unknown field: 'select' of a source derives columns",
    ),
    "windows:\n": (
        "join: {a: b}\nwindows:\n",
        "shop.yaml:12: join: unknown field: tidegate has no",
    ),
    "    max_jump: 1d\n": (
        "    max_jump: 1d\n    deduplicate: [item]\n",
        "shop.yaml:10: sources.web.deduplicate: unknown field: tidegate removes no duplicates",
    ),
    "keys: [item]\n": (
        "keys: ['upper(item)']\n",
        "no column upper(item) in the schema (or '_source'); a key is a column, and 'select'",
    ),
    "kind: tumbling\n": (
        "kind: tumbling\n    from: big\n",
        "windows.hourly.from: unknown field: only pipes and reducers have it, windows see all",
    ),
    "n: count(*), ": (
        "n: approx_quantile(amount, 0.5), ",
        "shop.yaml:17: windows.hourly.aggregates.n: not an aggregate: 'approx_quantile(amount'",
    ),
    "  store: {<<: *shop, path: inbox/store/}": (
        "  store: {path: inbox/store/, schema: {at: timestamp}, event_time: at, lag: 30s}",
        "shop.yaml:10: sources.store: all sources of a pipeline share one schema",
    ),
    "  store: {": ("\tstore: {", "shop.yaml:10: not valid YAML: a tab; indent with spaces"),
    "    event_time: at\n": (
        "    event_time: at\n    event_time: at\n",
        'not valid YAML: found duplicate key "event_time"\n',
    ),
}


@pytest.mark.parametrize("wrong", MISTAKES)
def test_a_mistake_is_named_once_at_its_line(cli: Cli, wrong: str) -> None:
    """Three sources share the mistakes of the anchor; the expressions need no JVM."""
    replacement, message = MISTAKES[wrong]
    Path("shop.yaml").write_text(SHOP.replace(wrong, replacement, 1))
    said = cli("validate", "shop.yaml")
    assert said.exit_code == 2
    assert message in said.err
    lines = [line for line in said.err.splitlines() if "shop.yaml:" in line]
    assert len(lines) == 1, said.err


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ("format: csv", "declare timestamp, and parse: {timestamps: ms} for milliseconds"),
        ("format: parquet", "not long\n"),
        ("format: csv, select: {at: 'cast(at as long)', item: item}", "cast it in 'select'"),
    ],
)
def test_a_number_as_event_time_is_told_how_to_become_one(
    cli: Cli, options: str, advice: str
) -> None:
    """Of text formats by a unit; Parquet has timestamps of its own; selected columns by a cast."""
    Path("shop.yaml").write_text(
        "apiVersion: tidegate/v1\nname: shop\nsources:\n  web: {path: inbox/web/, "
        f"schema: {{at: long, item: string}}, event_time: at, lag: 30s, {options}}}\n"
    )
    assert advice in cli("validate", "shop.yaml").err


def test_expressions_that_spark_reads_are_valid(cli: Cli) -> None:
    """Spark's own names are translated; what cannot be translated is left to Spark, and said."""
    good = (
        "sum(case when item = 'a' then amount end)",
        "\"max(date_format(at, 'yyyy'))\"",
        "max(upper(`item`))",
        '"sql(array_sort(filter(collect_list(amount), x -> x > 1)))"',
        '"sql(slice(reverse(array_sort(collect_list(amount))), 1, 2))"',
        "count(_source)",
    )
    for expression in good:
        Path("shop.yaml").write_text(SHOP.replace("total: sum(amount)", f"total: {expression}"))
        assert cli("validate", "shop.yaml").exit_code == 0, expression
    Path("shop.yaml").write_text(SHOP.replace("sum(amount)", "max(no_such_function(item))"))
    said = cli("validate", "shop.yaml")
    assert "windows.hourly.aggregates.total: Spark checks this expression" in said.out


@pytest.mark.parametrize("field", ["size", "slide", "gap"])
def test_a_window_longer_than_400_000_days_is_refused(field: str) -> None:
    """Its end would have no date."""
    day = "1d"
    sizes = {"gap": day} if field == "gap" else {"size": day, "slide": day}
    window = {
        "kind": "session" if field == "gap" else "sliding",
        **sizes,
        "aggregates": {"n": "count(*)"},
    }

    def build(span: str) -> PipelineSpec:
        """The shop with a window of this length."""
        windows = json.dumps({"hourly": {**window, field: span}})
        return parse_spec(SHOP.partition("windows:")[0] + f"windows: {windows}\n")

    require_no_mistakes(build("400000d"))
    with pytest.raises(ConfigurationError, match=rf"windows\.hourly\.{field}: must be at most"):
        require_no_mistakes(build("400001d"))


def test_a_start_is_refused_before_the_lease() -> None:
    """What DuckDB finds, and what only Spark can find, are errors of the spec."""
    wrong = parse_spec(SHOP.replace("sum(amount)", "sum(item)"))
    with pytest.raises(ConfigurationError, match=r"windows\.hourly\.aggregates\.total"):
        require_no_mistakes(wrong)
    spec = parse_spec(SHOP.replace("sum(amount)", "max(no_such_function(item))"))
    (unjudged,) = require_no_mistakes(spec)

    class Session:
        def createDataFrame(  # noqa: N802 - Spark's name
            self, _rows: object, ddl: str
        ) -> Session:
            assert "`amount` double" in ddl
            return self

        def selectExpr(  # noqa: N802
            self, sql: str
        ) -> Session:
            raise AnalysisException(f"cannot resolve {sql}\nplan")

    with pytest.raises(
        ConfigurationError, match=r"total: cannot resolve no_such_function\(item\)\n"
    ):
        judge_with_spark(Session(), spec, [unjudged])


def test_functions_and_pipes_are_checked(cli: Cli) -> None:
    """A module that is not there, and DuckDB's own SQL in pipes and reducers."""
    streams = """
streams: {big: {schema: {at: timestamp, item: string, amount: double}}}
pipes: {large: {from: events, to: big, where: amont > 1}}
reducers: {odd: {from: events, to: big, function: 'no_such_module:fold'}}
"""
    Path("shop.yaml").write_text(SHOP + streams)
    said = cli("validate", "shop.yaml")
    assert "pipes.large.where: Binder Error: Referenced column" in said.err
    assert "reducers.odd.function: no reducer at no_such_module:fold" in said.err


def test_a_reducer_beside_its_spec_is_found(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`validate` and `run` import it from there, in children as well."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    folder = tmp_path / "specs"
    folder.mkdir()
    (folder / "my_rules_of_shops.py").write_text(
        "def keep_first(state, row):\n    return state, []\n"
    )
    streams = """
streams: {big: {schema: {at: timestamp, item: string, amount: double}}}
reducers: {odd: {from: events, to: big, function: 'my_rules_of_shops:keep_first'}}
"""
    (folder / "shop.yaml").write_text(SHOP + streams)
    said = cli("validate", "specs/shop.yaml")
    assert said.exit_code == 0, said.err
    assert str(folder) in os.environ["PYTHONPATH"].split(os.pathsep)


def test_two_sources_over_one_folder_are_reported() -> None:
    """Their rows would count twice; a folder within the other counts as well."""
    text = SHOP.replace("path: inbox/store/", "path: inbox/web").replace(
        "inbox/phone", "inbox/web/x"
    )
    warnings = [one for one in list_spec_warnings(parse_spec(text)) if "read the same" in one]
    assert len(warnings) == 3
    assert list_spec_warnings(parse_spec(SHOP)) == []


def test_specs_of_the_project_have_no_mistakes(cli: Cli) -> None:
    """No false alarm in any spec that the project ships."""
    root = Path(__file__).resolve().parents[2]
    specs = {*root.glob("docs/examples/**/*.yaml"), *root.glob("dags/pipelines/*.yaml")}
    for path in sorted(specs - {*root.glob("docs/examples/**/cases/**/*.yaml")}):
        spec = load_any_spec(path)
        if isinstance(spec, PipelineSpec):
            require_no_mistakes(spec)


RULES = """\
    rules:
      known: {predicate: "item in ('a', 'b')", severity: drop}
      large:
        predicate: "PREDICATE"
"""


@pytest.mark.parametrize(
    ("predicate", "says"),
    [
        ("amount >", "amount > is not Spark SQL"),
        ("item = 'a", "item = 'a is not Spark SQL"),
        ("amount > 1; item = 'a'", "is not one expression"),
        ("amount + 1", "amount + 1 is of type double, not a condition"),
        ("sum(amount) > 0", "cannot have aggregates"),
        ("amount > (select 1)", "cannot have aggregates"),
        ("amount > 0 as x", "cannot have aggregates"),
        ("at < now()", "now: a replay has to get the same answer again"),
        ("rand() > 0.5", "rand: a replay has to get the same answer again"),
        ("amont > 0", "no column 'amont', did you mean 'amount'?"),
    ],
)
def test_a_bad_row_rule_is_named_at_its_line(
    cli: Cli, tmp_path: Path, predicate: str, says: str
) -> None:
    """A rule that does not parse, or names an unknown column, is refused with line and field."""
    path = tmp_path / "shop.yaml"
    rules = RULES.replace("PREDICATE", predicate)
    path.write_text(SHOP.replace("    max_jump: 1d\n", f"    max_jump: 1d\n{rules}"))
    said = cli("validate", str(path))
    assert said.exit_code == 2
    text = " ".join(said.err.split())
    assert "shop.yaml:13: sources.web.rules.large.predicate: " in text
    assert says in text


@pytest.mark.parametrize(
    "predicate",
    [
        "`amount` > 0 -- a comment",
        "case when item is null then false else amount > 1 end",
        "item",
        "at > timestamp '2020-01-01'",
        "amount between 1 and 9 or item rlike '^x'",
    ],
)
def test_conditions_of_spark_sql_are_row_rules(predicate: str) -> None:
    """Any condition over the columns of the source is a rule."""
    columns = "item: boolean" if predicate == "item" else "item: string"
    text = SHOP.replace("item: string", columns).replace("    keys: [item]\n", "")
    spec = parse_spec(text.replace("    max_jump: 1d\n", RULES.replace("PREDICATE", predicate)))
    known = ("sources", "web", "rules", "large", "predicate")
    assert known not in [field.place for field in require_no_mistakes(spec)]


def test_suites_next_to_the_spec_are_found(cli: Cli, tmp_path: Path) -> None:
    """From another working folder `validate` finds the suites that the quality run finds."""
    suites = tmp_path / "specs/checks"
    suites.mkdir(parents=True)
    spec = tmp_path / "specs/shop.yaml"
    spec.write_text(f"{SHOP}quality: {{suites: checks}}\n")
    assert cli("validate", str(spec)).exit_code == 0
    suites.rmdir()
    refused = cli("validate", str(spec))
    assert (refused.exit_code, "no folder" in refused.err) == (2, True)
