"""`tidegate test`: exit codes, results for people and programs."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.cli.conftest import Cli

CASE = """\
description: One flight
steps:
  - rows: {EWR: [{sched: 2026-01-01T00:00:00Z, carrier: UA}]}
  - end
expect:
  tables: {events: [{carrier: UA}]}
"""


@pytest.fixture
def case(spec_file: Path) -> Path:
    path = spec_file.parent / "cases" / "flights" / "one.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(CASE)
    return path


def test_results_have_exit_codes(cli: Cli, spec_file: Path, case: Path) -> None:
    """0, 1 and 2; all cases are run, and JUnit XML has the same."""
    said = cli("test", str(spec_file), "--junit", "passed.xml")
    assert (said.exit_code, said.out.split()[0]) == (0, "passed")
    failed, bad = case.with_name("two.yaml"), case.with_name("wrong.yaml")
    failed.write_text(CASE.replace("[{carrier: UA}]", "[{carrier: DL}]"))
    said = cli("test", str(spec_file))
    assert said.exit_code == 1
    assert f"{failed.parent}/two.yaml:6: table events: 1 missing and 1 not expected" in said.out
    assert "flights: 1 passed, 1 failed" in said.out
    bad.write_text("steps:\n  - sleep: 1s\n")
    said = cli("test", str(spec_file), "--json", "--junit", "all.xml")
    assert said.exit_code == 2
    assert [one["verdict"] for one in said.data] == ["passed", "failed", "bad"]
    assert said.data[0]["description"] == "One flight"
    suite = ElementTree.parse("all.xml").getroot()[0]
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["3", "1", "1"]
    assert [[found.tag for found in one] for one in suite] == [[], ["failure"], ["error"]]


def test_what_cannot_be_tested_is_refused(cli: Cli, spec_file: Path, case: Path) -> None:
    """A case that does not exist, a result that cannot be written, a job, a spec without cases."""
    said = cli("test", str(spec_file), "none.yaml", "--json")
    assert (said.exit_code, said.data[0]["verdict"]) == (2, "bad")
    said = cli("test", str(spec_file), "none.yaml", "--junit", "no/folder.xml")
    assert (said.exit_code, "cannot write no/folder.xml" in said.err) == (2, True)
    job = spec_file.with_name("job.yaml")
    job.write_text("kind: job\nname: j\napp: a.py\n")
    said = cli("test", str(job))
    assert (said.exit_code, "j is a job" in said.err) == (2, True)
    case.unlink()
    assert "there are no test cases in" in cli("test", str(spec_file)).err
