"""``make faults``: runs the test of each fault that the review of commit e3dab94 found.

The faults are the rows of docs/track-record.md whose id has two parts, such as ``core-C2``. The
command prints a line for each; the last line is ``N of N ids, N passed, N failed``.

With ``--on COMMIT`` the tests of today run on the code of that commit, in a checkout of its own.
There no test may pass, because it should have found the fault. The last line counts the ids whose
test fails, and those whose test file needs names that the commit does not have.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from tests.named_tests import ROOT

_ROW = re.compile(
    r"^\| ([a-z]+-[A-Z]*\d+[a-z]?) \| (S\d) \| (.*?) \| (\w+) \| `?(.*?)`? ?\|$", re.M
)


@dataclass(frozen=True)
class Fault:
    """One row of the track record.

    Attributes:
        number: its id; the part before the hyphen names the report.
        text: what was wrong.
        test: path of a test file, ``::`` and the function; empty while the fault is open.
    """

    number: str
    text: str
    test: str


def read_faults() -> list[Fault]:
    """Return the faults of that review in the order of the track record."""
    text = (ROOT / "docs" / "track-record.md").read_text("utf-8")
    return [Fault(number, what, test) for number, _, what, _, test in _ROW.findall(text)]


def run_tests(folder: Path, tests: Sequence[str]) -> dict[str, str]:
    """Run tests of a checkout one after the other; return the outcome of each.

    Args:
        folder: the checkout, whose own code is imported.
        tests: paths with ``::`` and a function without parameters.

    Returns:
        Test -> ``passed``, ``failed``, or ``missing`` where it could not even be collected.
    """
    folders = sorted({str(Path(test).parent) for test in tests})
    found: dict[str, str] = {}
    # One run for each folder: a `conftest.py` that the checkout's code does not fit ends its run.
    for place in folders:
        found |= _run_files(folder, [test for test in tests if str(Path(test).parent) == place])
    return {test: found.get(test, "missing") for test in tests}


def _run_files(folder: Path, tests: Sequence[str]) -> dict[str, str]:
    files = sorted({test.partition("::")[0] for test in tests})
    names = " or ".join(sorted({test.partition("::")[2] for test in tests}))
    with TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
        command += ["-m", "slow or not slow", "-k", names, "-o", "junit_family=xunit1"]
        # The installed plugin would import modules that the checkout does not have.
        command += ["-p", "no:tidegate"]
        # Otherwise one file that the checkout's code does not fit would end the whole run.
        command += ["--continue-on-collection-errors", f"--junitxml={report}", *files]
        environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        subprocess.run(command, cwd=folder, env=environment, check=False)
        return dict(_read_outcomes(report)) if report.exists() else {}


def _read_outcomes(report: Path) -> Iterator[tuple[str, str]]:
    found: dict[str, set[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('file')}::{str(case.get('name')).partition('[')[0]}"
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found.setdefault(name, set()).update(bad or ["passed"])
    for name, kinds in found.items():
        yield name, "passed" if kinds == {"passed"} else "failed"


@contextmanager
def check_out(commit: str) -> Iterator[Path]:
    """Give a checkout of a commit with the tests of today, and remove it at the end."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, "checkout")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(folder), commit], check=True)
        try:
            shutil.rmtree(folder / "tests")
            shutil.copytree(
                ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__")
            )
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def main() -> int:
    """Run the tests of all faults; return 1 if one has not the outcome that it should have."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", metavar="COMMIT", help="run on the code of this commit")
    parser.add_argument("ids", nargs="*", help="only these faults")
    given = parser.parse_args()
    faults = [one for one in read_faults() if not given.ids or one.number in given.ids]
    tests = sorted({fault.test for fault in faults if fault.test})
    if given.on:
        with check_out(given.on) as folder:
            outcomes = run_tests(folder, tests)
    else:
        outcomes = run_tests(ROOT, tests)
    counts: Counter[str] = Counter()
    for fault in faults:
        outcome = outcomes[fault.test] if fault.test else "open"
        counts[outcome] += 1
        sys.stdout.write(f"{outcome:8} {fault.number:12} {fault.text}\n")
    total, passed = len(faults), counts["passed"]
    if given.on:
        sys.stdout.write(
            f"{counts['failed']} of {total} ids are red on {given.on}, {counts['missing']} need"
            f" names that it lacks, {passed} passed\n"
        )
        return int(passed > 0)
    sys.stdout.write(f"{total} of {total} ids, {passed} passed, {total - passed} failed\n")
    return int(passed != total)


if __name__ == "__main__":
    raise SystemExit(main())
