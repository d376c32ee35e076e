"""``make faults``: runs the test of each fault that the review of commit e3dab94 found.

The faults are the rows of docs/track-record.md whose id has two parts, such as ``core-C2``. The
command prints a line for each; the last line is ``N of N ids, N passed, N failed``.

With ``--on COMMIT`` the tests of today run on the code of that commit, in a checkout of its own.
There no test may pass, because it should have found the fault. A test is red only if what it
asserts does not hold. One that needs a name of today's code proves nothing about that commit. Then
a test in ``tests/on_COMMIT`` says by the names of that commit what should hold. These tests run
beside that commit's own ones, and use their fixtures. A fault without one has a line that says
which name did not exist.
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

_ROW = re.compile(r"^\| ([a-z]+-[A-Z]*\d+[a-z]?) \| (S\d) \| (.*?) \| (\w+) \| (.*?) ?\|$", re.M)
# How Python says that code lacks a name, or a parameter, that a test uses.
_MISSING = re.compile(
    r"No module named '(.+?)'|cannot import name '(.+?)'|has no attribute '(.+?)'"
    r"|unexpected keyword argument '(.+?)'|(\w+)\(\) (?:takes|missing) .* argument"
)
# A test by the names of an old commit: test_core_c2 is about core-C2.
_OLD_TEST = re.compile(r"^def (test_([a-z]+)_([a-z]*\d+))\(", re.M)
_OUTCOMES = ("passed", "failed", "open")
_SHOWN = 4000  # characters of what pytest prints of each folder


@dataclass(frozen=True)
class Fault:
    """One row of the track record.

    Attributes:
        number: its id; the part before the hyphen names the report.
        text: what was wrong.
        tests: paths of test files, each with ``::`` and the function; none while it is open.
    """

    number: str
    text: str
    tests: tuple[str, ...]


def read_faults() -> list[Fault]:
    """Return the faults of that review in the order of the track record."""
    text = (ROOT / "docs" / "track-record.md").read_text("utf-8")
    return [
        Fault(number, what, tuple(re.findall("`(.+?)`", tests)))
        for number, _, what, _, tests in _ROW.findall(text)
    ]


def run_tests(folder: Path, tests: Sequence[str]) -> dict[str, str]:
    """Run tests of a checkout one after the other; return the outcome of each.

    Args:
        folder: the checkout, whose own code is imported.
        tests: paths with ``::`` and a function without parameters.

    Returns:
        Test -> ``passed``, ``failed``, or the name that the checkout's code lacks.
    """
    folders = sorted({str(Path(test).parent) for test in tests})
    found: dict[str, str] = {}
    # One run for each folder: a `conftest.py` that the checkout's code does not fit ends its run.
    for place in folders:
        found |= _run_files(folder, [test for test in tests if str(Path(test).parent) == place])
    return found


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
        done = subprocess.run(
            command, cwd=folder, env=environment, check=False, capture_output=True, text=True
        )
        sys.stdout.write(done.stdout[-_SHOWN:])
        # Without a report `conftest.py` itself did not fit.
        texts = _read_texts(report) if report.exists() else {}
        return {test: _judge(texts, test, done.stderr) for test in tests}


def _read_texts(report: Path) -> dict[str, list[str]]:
    """Return what the tests of a report say: a text for each failure, an empty one for a success.

    Keys are paths with functions, and for a file that could not be read its module's name.
    """
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        function = str(case.get("name")).partition("[")[0]
        name = f"{case.get('file')}::{function}" if case.get("file") else function
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        texts = [f"{child.get('message')}\n{child.text}" for child in bad]
        found.setdefault(name, []).extend(texts or [""])
    return found


def _judge(texts: dict[str, list[str]], test: str, stderr: str) -> str:
    file = test.partition("::")[0]
    # A file that could not be read has one entry, by its path or as a module.
    ends = (file, file.removesuffix(".py").replace("/", "."))
    unread = [text for name in texts if name.endswith(ends) for text in texts[name]]
    said = texts.get(test) or unread or [stderr or "the test was not collected"]
    if not any(said):
        return "passed"
    reasons = [find_missing_name(text) for text in said if text]
    # Of a test with parameters one case that is red by what it asserts is enough.
    return "failed" if None in reasons else str(reasons[0])


def find_missing_name(text: str) -> str | None:
    """Return the name that code lacks, as a failure says; None for a failure of another kind.

    >>> find_missing_name("ImportError: cannot import name 'seal' from 'tidegate'")
    'seal'
    >>> find_missing_name("TypeError: build_log() takes 3 positional arguments but 4 were given")
    'build_log'
    >>> find_missing_name("AssertionError: assert 'running' == 'finished'")
    """
    first = text.strip().partition("\n")[0]
    if first.startswith(("AssertionError", "assert", "Failed")):
        return None
    found = _MISSING.search(text)
    return next((name for name in found.groups() if name), None) if found else None


@contextmanager
def check_out(commit: str, tests: Path | None = None) -> Iterator[Path]:
    """Give a checkout of a commit, and remove it at the end.

    Args:
        commit: as Git names it.
        tests: a folder whose files are added to the commit's own tests; None: the tests of today
            take their place.
    """
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, "checkout")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(folder), commit], check=True)
        try:
            if tests is None:
                shutil.rmtree(folder / "tests")
            shutil.copytree(
                tests or ROOT / "tests",
                folder / "tests",
                ignore=shutil.ignore_patterns("__pycache__"),
                dirs_exist_ok=True,
            )
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def find_old_tests(folder: Path) -> dict[str, str]:
    """Return the tests by the names of an old commit: the id of a fault in lower case -> test."""
    return {
        f"{report}-{number}": f"{Path('tests', file.relative_to(folder))}::{test}"
        for file in sorted(folder.rglob("*.py"))
        for test, report, number in _OLD_TEST.findall(file.read_text("utf-8"))
    }


def run_on_commit(commit: str, faults: Sequence[Fault]) -> dict[str, str]:
    """Return the outcome of each fault on the code of a commit, as `run_tests` tells it."""
    tests = sorted({test for fault in faults for test in fault.tests})
    with check_out(commit) as folder:
        outcomes = run_tests(folder, tests)
    found = {
        fault.number: _join_outcomes([outcomes[test] for test in fault.tests], on_old=True)
        for fault in faults
    }
    place = ROOT / "tests" / f"on_{commit}"
    known = find_old_tests(place)
    missing = [one for one, outcome in found.items() if outcome not in _OUTCOMES]
    old = {number: known[number.lower()] for number in missing if number.lower() in known}
    if old:
        with check_out(commit, place) as folder:
            outcomes = run_tests(folder, sorted(old.values()))
        found |= {number: outcomes[test] for number, test in old.items()}
    return found


def main() -> int:
    """Run the tests of all faults; return 1 if one has not the outcome that it should have."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", metavar="COMMIT", help="run on the code of this commit")
    parser.add_argument("ids", nargs="*", help="only these faults")
    given = parser.parse_args()
    faults = [one for one in read_faults() if not given.ids or one.number in given.ids]
    if given.on:
        outcomes = run_on_commit(given.on, faults)
    else:
        each = run_tests(ROOT, sorted({test for fault in faults for test in fault.tests}))
        outcomes = {
            fault.number: _join_outcomes([each[test] for test in fault.tests], on_old=False)
            for fault in faults
        }
    counts: Counter[str] = Counter()
    for fault in faults:
        outcome = outcomes[fault.number]
        kind = outcome if outcome in _OUTCOMES else "missing"
        counts[kind] += 1
        sys.stdout.write(f"{kind:8} {fault.number:12} {fault.text}\n")
        if kind == "missing":
            sys.stdout.write(f"         cannot be run there: {outcome} did not exist\n")
    total, passed = len(faults), counts["passed"]
    if given.on:
        sys.stdout.write(
            f"{total} of {total} ids: {counts['failed']} red on {given.on}, {counts['missing']}"
            f" cannot be run there, {passed} passed\n"
        )
        return int(passed > 0)
    sys.stdout.write(f"{total} of {total} ids, {passed} passed, {total - passed} failed\n")
    return int(passed != total)


def _join_outcomes(outcomes: Sequence[str], *, on_old: bool) -> str:
    """Return the outcome of a fault: all tests pass today, and one is red on the old code."""
    if not outcomes:
        return "open"
    order = ("failed", "passed") if on_old else ("failed",)
    others = [one for one in outcomes if one != "passed"]
    return next((one for one in order if one in outcomes), (others or ["passed"])[0])


if __name__ == "__main__":
    raise SystemExit(main())
