"""pytest finds and runs cases, and starts without the rest of tidegate."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cases.shop import EXPECTED, JSON, ON_TIME, SPEC, write_case

pytest_plugins = ["pytester"]

TEST = """\
def test_fixture(tidegate_case):
    tidegate_case("orders.yaml", "cases/orders/good/case.yaml")
"""


def test_cases_are_tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the specs that are named, and those that a test runs; failures show the diff."""
    # Where tidegate is installed, pytest would load the plugin a second time.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    good, bad = (pytester.path / "cases" / "orders" / name for name in ("good", "bad"))
    for folder in (good, bad):
        folder.mkdir(parents=True)
    write_case(good, ON_TIME, "  - end\n", EXPECTED)
    write_case(bad, ON_TIME, "  - end\n", EXPECTED.replace("orders: 2", "orders: 3"))
    (pytester.path / "orders.yaml").write_text(SPEC.format(source=JSON, more=""))
    (pytester.path / "other.yaml").write_text("no case")
    pytester.makeini("[pytest]\ntidegate_specs = orders.yaml\n")
    pytester.makepyfile(test_orders=TEST)
    ended = pytester.runpytest_inprocess("-p", "tidegate.jobs.cases.pytest_plugin", "-q")
    ended.assert_outcomes(passed=2, failed=1)
    assert "table per_minute: 1 missing and 1 not expected" in ended.stdout.str()


def test_the_plugin_imports_nothing_heavy() -> None:
    """Every pytest beside tidegate loads it at its start."""
    heavy = {"pyarrow", "pyspark", "duckdb", "pydantic", "tidegate.errors"}
    code = f"import sys, tidegate.jobs.cases.pytest_plugin; print({heavy} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "set()\n", ended.stderr
