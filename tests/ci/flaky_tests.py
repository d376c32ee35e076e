"""Which tests may fail once: none of the unit tier, three in a run, and no known one for long.

`tests/flaky.toml` lists the known ones. Nothing but commits survives a run of CI, so the history
of git counts the runs: commits that lie less than three hours apart came with one push, and each
push is one run.
"""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

MAX_FLAKY: Final = 3
MAX_RUNS: Final = 10
_PUSH: Final = timedelta(hours=3)
_KEYS: Final = {"name", "since", "suspicion"}


class FlakyListError(Exception):
    """tests/flaky.toml cannot be used as it is."""


@dataclass(frozen=True)
class KnownTest:
    """One entry of tests/flaky.toml."""

    name: str
    since: datetime
    suspicion: str


def read_known_tests(path: Path) -> list[KnownTest]:
    """The entries of the list.

    Raises:
        FlakyListError: an entry lacks something, or names no test.
    """
    entries = tomllib.loads(path.read_text("utf-8")).get("test", [])
    return [_parse_entry(entry, path.parents[1]) for entry in entries]


def _parse_entry(entry: dict[str, object], root: Path) -> KnownTest:
    if set(entry) != _KEYS or not entry["suspicion"]:
        raise FlakyListError(f"tests/flaky.toml: each test has {sorted(_KEYS)}, not {entry}")
    name, since = str(entry["name"]), entry["since"]
    if not isinstance(since, datetime) or since.tzinfo is None:
        raise FlakyListError(f"tests/flaky.toml: {name}: since is a time like 2026-11-28T09:00:00Z")
    file, _, function = name.partition("[")[0].partition("::")
    if not (root / file).is_file():
        raise FlakyListError(f"tests/flaky.toml: {name}: no such file")
    if f"def {function.rpartition('::')[2]}(" not in (root / file).read_text("utf-8"):
        raise FlakyListError(f"tests/flaky.toml: {name}: no such test in the file")
    return KnownTest(name, since, str(entry["suspicion"]))


def count_runs(commits: Iterable[datetime], since: datetime) -> int:
    """How many pushes, and so runs of CI, came after a time."""
    runs, push_ends = 0, since
    for commit in sorted(commits):
        if commit > since and (runs == 0 or commit >= push_ends):
            runs, push_ends = runs + 1, commit + _PUSH
    return runs


def read_commit_times(root: Path) -> list[datetime]:
    """When each commit was made that leads to the present one.

    Raises:
        FlakyListError: the clone has only a part of the history.
    """
    if _ask_git(root, "rev-parse", "--is-shallow-repository") != "false":
        raise FlakyListError("tests/flaky.toml: runs are counted by commits; clone all of them")
    stamps = _ask_git(root, "log", "--format=%ct").split()
    return [datetime.fromtimestamp(int(stamp), UTC) for stamp in stamps]


def _ask_git(root: Path, *arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if answer.returncode != 0:
        raise FlakyListError(f"tests/flaky.toml: git {arguments[0]}: {answer.stderr.strip()}")
    return answer.stdout.strip()


def judge_known_tests(known: Iterable[KnownTest], commits: list[datetime]) -> list[str]:
    """A line for each test that has been on the list for too long."""
    return [
        f"flaky for more than {MAX_RUNS} runs: {test.name}: repair it ({test.suspicion})"
        for test in known
        if count_runs(commits, test.since) > MAX_RUNS
    ]
