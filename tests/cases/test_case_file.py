"""A mistake in a case is reported with its file and line; nothing is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.shop import RETURNS, make_spec
from tidegate.errors import ConfigurationError
from tidegate.jobs.cases.case_file import find_cases, read_case
from tidegate.jobs.spec.pipeline import PipelineSpec

MISTAKES = {
    "steps: [": "1: not valid YAML",
    "- a": "1: spec: a mapping is needed, with description, start, steps, expect",
    "expect: {}": "1: steps: required field is missing",
    "steps: []\nexpct: {}": "2: expct: unknown field, did you mean 'expect'?",
    "steps: {}": "1: steps: a list is needed",
    "start: noon\nsteps: []": "1: start: 'noon' is not a time",
    "steps:\n  - wait": "2: steps.0: a mapping is needed, with rows, wait, restart, cti, end",
    "steps:\n  - {wait: 1s, end: orders}": "2: steps.0: a step has one of rows, wait",
    "steps:\n  - wait: 10": "2: steps.0.wait: a duration needs a unit",
    "steps:\n  - wait: 0s": "2: steps.0.wait: must be above 0",
    "steps:\n  - restart: 5s": "2: steps.0.restart: write `- restart`",
    "steps:\n  - end: [order]": "2: steps.0.end.0: no source 'order', did you mean 'orders'?",
    "steps:\n  - cti: {orders: soon}": "2: steps.0.cti.orders: 'soon' is not a time",
    "steps:\n  - cti: {order: 2026-01-01}": "2: steps.0.cti.order: unknown field",
    "steps:\n  - rows: [1]": "2: steps.0.rows: a mapping is needed, of sources to rows",
    "steps:\n  - rows:\n      order: []": "3: steps.0.rows.order: no source 'order'",
    "steps:\n  - rows:\n      orders: 5": "3: steps.0.rows.orders: rows are a list of mappings",
    "steps:\n  - rows:\n      orders/eu: []": "3: steps.0.rows.orders/eu: orders is one partition",
    "steps:\n  - rows:\n      returns: []": "3: steps.0.rows.returns: returns has a partition per",
    "steps:\n  - rows:\n      orders:\n        - 5": "4: steps.0.rows.orders.0: a row is a mapping",
    "steps:\n  - rows:\n      orders:\n        - {shp: a}": (
        "4: source orders has no column 'shp', did you mean 'shop'?"
    ),
    "steps:\n  - rows:\n      orders: |\n        shop\n        a,b": (
        "5: the row has not as many values as the header"
    ),
    "steps:\n  - rows:\n      orders: |\n        shop,amont\n        a,3": (
        "5: source orders has no column 'amont'"
    ),
    "steps:\n  - rows:\n      orders: {file: none.csv}": "3: steps.0.rows.orders.file: there is no",
    "steps:\n  - rows:\n      orders: {object: none}": "3: steps.0.rows.orders.object: there is no",
    "steps: []\nexpect: 5": "2: expect: a mapping is needed, with tables, counters, error",
    "steps: []\nexpect:\n  tables: {per_hour: []}": "3: expect.tables.per_hour: unknown field",
    "steps: []\nexpect:\n  tables:\n    per_minute: [{sum: 1}]": (
        "4: table per_minute has no column 'sum'"
    ),
    "steps: []\nexpect:\n  counters: {reed: 1}": "3: expect.counters.reed: no such counter",
    "steps: []\nexpect:\n  counters: {read: many}": "3: expect.counters.read: a number of rows",
    "steps: []\nexpect:\n  counters: {orders: 5}": "3: expect.counters.orders: a mapping is needed",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_has_its_line(tmp_path: Path, text: str) -> None:
    """Each kind of mistake."""
    path = tmp_path / "case.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        read_case(path, make_spec(more=RETURNS))
    assert f"{path}:{MISTAKES[text]}" in str(refused.value)


def test_all_mistakes_are_listed(tmp_path: Path) -> None:
    """Also those in files beside the case, which have their own lines."""
    (tmp_path / "rows.csv").write_text("shop,amount\na,3\nb,4,5\n")
    path = tmp_path / "case.yaml"
    path.write_text("steps:\n  - rows: {orders: {file: rows.csv}}\n  - wait: 5\n  - sleep: 1s\n")
    with pytest.raises(ConfigurationError) as refused:
        read_case(path, make_spec())
    lines = str(refused.value).splitlines()
    starts = [f"{path}:3", f"{path}:4", f"{path}:4", f"{tmp_path}/rows.csv:3"]
    assert [line.partition(": ")[0] for line in lines if line.startswith(str(tmp_path))] == starts


def test_a_value_of_a_typed_source_has_to_fit(tmp_path: Path) -> None:
    """Parquet has no place for another value, so that it cannot become a dead letter."""
    path = tmp_path / "case.yaml"
    path.write_text("steps:\n  - rows:\n      orders:\n        - {shop: a, amount: many}\n")
    with pytest.raises(ConfigurationError, match=r":4: amount: 'many' is not of type double"):
        read_case(path, make_spec("path: orders/"))
    assert read_case(path, make_spec()).steps


PLACES = (
    "X",
    "steps: X",
    "description: X\nsteps: []",
    "start: X\nsteps: []",
    "steps: [X]",
    *(f"steps: [{{{action}: X}}]" for action in ("rows", "wait", "restart", "cti", "end")),
    *(f"steps: [{{{action}: {{orders: X}}}}]" for action in ("rows", "cti")),
    "steps: [{end: [X]}]",
    "steps: [{rows: {orders: [X]}}]",
    *(f"steps: [{{rows: {{orders: {{{form}: X}}}}}}]" for form in ("file", "object")),
    *(f"steps: [{{rows: {{orders: [{{{name}: X}}]}}}}]" for name in ("placed", "shop", "amount")),
    "steps: []\nexpect: X",
    *(f"steps: []\nexpect: {{{name}: X}}" for name in ("tables", "counters", "error")),
    "steps: []\nexpect: {tables: {per_minute: X}}",
    "steps: []\nexpect: {tables: {per_minute: [{amount: X}]}}",
    *(f"steps: []\nexpect: {{counters: {{{name}: X}}}}" for name in ("read", "orders", "X")),
)
ODD_VALUES = (
    *("null", "true", "-1", "1e400", ".nan", "9999999999999999999999", "x", "''", "2026-02-30"),
    *("[]", "[[]]", "[null]", "{}", "{a: 1}", "{null: 1}", "{1: {}}", "99999999999999999999d"),
    *('"a,a\\n1,2"', '"a\\n\\0"', "odd.csv", "odd.bin", ".", "x" * 300, "? [a]\n  : 1"),
)


def explain_refusal(path: Path, spec: PipelineSpec) -> str:
    """What is wrong with a case; its path if nothing is."""
    try:
        read_case(path, spec)
    except ConfigurationError as error:
        return str(error)
    return str(path)


@pytest.mark.parametrize("place", PLACES)
def test_no_value_of_a_case_is_a_defect(tmp_path: Path, place: str) -> None:
    """Each place of a case, with any value: it is read, or refused with the name of the file."""
    path = tmp_path / "case.yaml"
    (tmp_path / "odd.csv").write_bytes(b"shop\n\xff\n")
    (tmp_path / "odd.bin").write_bytes(b"\0\r\n\xfe")
    spec = make_spec()
    for value in ODD_VALUES:
        path.write_text(place.replace("X", value))
        assert str(path.parent) in explain_refusal(path, spec), value


def test_a_csv_file_with_a_huge_value_is_refused(tmp_path: Path) -> None:
    """Python's reader of CSV takes up to 128 KiB."""
    path = tmp_path / "case.yaml"
    path.write_text("steps: [{rows: {orders: {file: rows.csv}}}]")
    (tmp_path / "rows.csv").write_text("shop\na\n" + "b" * 140_000)
    with pytest.raises(ConfigurationError, match=r"rows\.csv:3: field larger than"):
        read_case(path, make_spec())


def test_cases_lie_beside_the_spec(tmp_path: Path) -> None:
    """Files and folders that are given count instead."""
    spec, folder = tmp_path / "orders.yaml", tmp_path / "cases" / "orders"
    with pytest.raises(ConfigurationError, match="no test cases in"):
        find_cases(spec, [])
    (folder / "deep").mkdir(parents=True)
    for name in ("b.yaml", "a.yaml", "deep/c.yaml", "rows.csv"):
        (folder / name).write_text("")
    found = [folder / name for name in ("a.yaml", "b.yaml", "deep/c.yaml")]
    assert find_cases(spec, []) == found
    assert find_cases(spec, [folder]) == found
    assert find_cases(spec, [folder / "none.yaml"]) == [folder / "none.yaml"]
    with pytest.raises(ConfigurationError, match="No such file"):
        read_case(folder / "none.yaml", make_spec())
