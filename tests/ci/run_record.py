"""What the parts of one run of CI leave for its last lines: flaky tests, durations, omissions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FlakyTest:
    """Failed beside others and passed alone."""

    name: str
    is_unit: bool
    text: str  # of its first failure


@dataclass(frozen=True)
class PartTime:
    """How long one part took."""

    name: str
    seconds: int


class RunRecord:
    """A folder with one file per kind; each part appends lines to them."""

    def __init__(self, folder: Path) -> None:
        self._flaky = folder / "flaky.jsonl"
        self._durations = folder / "durations.jsonl"
        self._left_out = folder / "left_out.jsonl"
        self._parts = folder / "parts.tsv"  # written by .ci/run

    def add_flaky_test(self, test: FlakyTest) -> None:
        """Remember a test that passed at its second try."""
        _append_lines(self._flaky, [asdict(test)])

    def read_flaky_tests(self) -> list[FlakyTest]:
        """All of the run, in their order."""
        return [FlakyTest(**line) for line in _read_lines(self._flaky)]

    def add_durations(self, seconds: Mapping[str, float]) -> None:
        """Remember how long tests took."""
        _append_lines(self._durations, seconds.items())

    def list_slowest_tests(self, count: int) -> list[tuple[str, float]]:
        """The tests that took longest, with their seconds."""
        found = [(str(name), float(taken)) for name, taken in _read_lines(self._durations)]
        return sorted(found, key=lambda pair: -pair[1])[:count]

    def add_left_out(self, tests: Iterable[str]) -> None:
        """Remember the tests for which there was no time."""
        _append_lines(self._left_out, tests)

    def read_left_out(self) -> list[str]:
        """Those of the whole run, in their order."""
        return [str(test) for test in _read_lines(self._left_out)]

    def read_part_times(self) -> list[PartTime]:
        """The parts in their order."""
        if not self._parts.exists():
            return []
        rows = (line.split("\t") for line in self._parts.read_text("utf-8").splitlines())
        return [PartTime(name, int(seconds)) for name, seconds in rows]


def _append_lines(path: Path, values: Iterable[Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(value)}\n" for value in values)


def _read_lines(path: Path) -> Iterator[Any]:
    if path.exists():
        yield from (json.loads(line) for line in path.read_text("utf-8").splitlines())
