"""Runs neutral case files: ``tidegate conformance run FILE…``.

A file is a JSON object: a header that states the suite's conventions, and lists of cases. Its stem names the adapter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from tidegate.jobs.conformance import barrier_suites, frontier_suites, window_suites
from tidegate.jobs.conformance.bench import ENGINES, benches
from tidegate.jobs.conformance.result import CaseResult
from tidegate.jobs.spec.errors import ConfigurationError

__all__ = ["CASE_LISTS", "FileReport", "Report", "run", "suites"]

CASE_LISTS = ("cases", "merge_cases", "must_be_rejected", "ordered_merge_cases")
"""Keys of a file that hold cases; everything else is its header."""
_AT_ONCE = 4  # cases on Spark: each waits for the driver's planning half of the time
_DECIDER_ONLY = "this suite is played on the decider's own parts; there is no adapter for engine {!r}"


@dataclass(frozen=True)
class FileReport:
    """Results of one file."""

    suite: str
    results: tuple[CaseResult, ...]
    seconds: float = 0.0

    def count(self, outcome: str) -> int:
        """Cases with this outcome."""
        return sum(result.outcome == outcome for result in self.results)


@dataclass(frozen=True)
class Report:
    """Results of all files."""

    engine: str
    files: tuple[FileReport, ...] = field(default_factory=tuple)

    @property
    def passed(self) -> int:
        """Cases that passed."""
        return sum(file.count("passed") for file in self.files)

    @property
    def failed(self) -> int:
        """Cases that failed."""
        return sum(file.count("failed") for file in self.files)

    @property
    def skipped(self) -> int:
        """Cases that are out of scope."""
        return sum(file.count("skipped") for file in self.files)

    def lines(self, *, skips: bool = True) -> Iterator[str]:
        """One line per failing case with its first differing step, one per skipped case with its reason, then the sum."""
        for file in self.files:
            for result in file.results:
                if result.outcome == "failed" or (skips and result.outcome == "skipped"):
                    yield f"{result.outcome}: {file.suite}: {result.id}: {result.detail}"
        yield f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "schema_version": 1,
            "engine": self.engine,
            "passed": self.passed,
            "failed": self.failed,
            "skipped": self.skipped,
            "files": [
                {
                    "suite": file.suite,
                    "passed": file.count("passed"),
                    "failed": file.count("failed"),
                    "skipped": file.count("skipped"),
                    "seconds": round(file.seconds, 1),
                    "cases": [{"id": r.id, "outcome": r.outcome, "detail": r.detail} for r in file.results],
                }
                for file in self.files
            ],
        }


def suites() -> dict[str, Callable[..., CaseResult]]:
    """File stem -> adapter, of all suites."""
    return {**frontier_suites.SUITES, **barrier_suites.SUITES, **window_suites.SUITES}


def run(files: Iterable[Path | str], engine: str = "decider") -> Report:
    """Run every case of every file.

    Suites about frontiers and barriers alone are played on the decider's own parts. On another engine their cases are skipped
    and say so: a pass there would be the decider's, under a wrong name. On Spark the cases of a suite share one session, and
    several run at the same time.

    Raises:
        ConfigurationError: there is no such engine; a file is missing, is no case file or has no adapter.
    """
    if engine not in ENGINES:
        raise ConfigurationError(
            f"no adapters for engine {engine!r}", code="conformance.engine", advice=f"choose one of {', '.join(ENGINES)}"
        )
    with benches(engine):
        return Report(engine, tuple(_run_file(Path(file), engine) for file in files))


def _run_file(path: Path, engine: str) -> FileReport:
    adapter = suites().get(path.stem)
    if adapter is None:
        known = f"known suites: {', '.join(sorted(suites()))}"
        raise ConfigurationError(f"{path}: no adapter for a suite of this name", code="conformance.unknown_suite", advice=known)
    document = _read(path)
    header = {key: value for key, value in document.items() if key not in CASE_LISTS} | {"folder": str(path.parent)}
    cases = list(_cases(path.stem, document))
    if engine != "decider" and path.stem not in window_suites.SUITES:
        return FileReport(path.stem, tuple(CaseResult(case["id"], "skipped", _DECIDER_ONLY.format(engine)) for case in cases))
    began = monotonic()
    with ThreadPoolExecutor(_AT_ONCE if engine == "spark" else 1) as pool:
        results = tuple(pool.map(lambda case: _run_case(adapter, header, case, engine), cases))
    return FileReport(path.stem, results, monotonic() - began)


def _run_case(adapter: Callable[..., CaseResult], header: Mapping[str, Any], case: Mapping[str, Any], engine: str) -> CaseResult:
    try:
        return adapter(header, case, engine)
    except Exception as error:
        return CaseResult(case["id"], "failed", f"{type(error).__name__}: {error}")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as a case file: {error}", code="conformance.file") from error
    if not isinstance(document, dict) or not isinstance(document.get("cases"), list):
        raise ConfigurationError(f"{path} is no case file: it has no list 'cases'", code="conformance.file")
    return document


def _cases(stem: str, document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name in CASE_LISTS:
        found = document.get(name)
        for number, case in enumerate(found if isinstance(found, list) else ()):
            yield case if "id" in case else {"id": f"{stem}.{name}.{number}", **case}
