"""Runs neutral case files: ``python -m tests.conformance FILE…``.

A file is a JSON object: a header that states the suite's conventions, and lists of cases. Its stem
names the adapter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from pydantic import ValidationError

from tests.conformance import barrier_suites, frontier_suites, window_suites
from tests.conformance.bench import ENGINES, benches
from tests.conformance.result import CaseResult
from tests.conformance.vocabulary import KNOWN, MalformedCaseError, UnknownFeatureError
from tidegate.errors import ConfigurationError

_NO_ADAPTER = "no adapter for a suite of this name: the beginning of the file's name is the suite"
_AT_ONCE = 4  # cases on Spark: each waits for the driver's planning half of the time
ON_PARTS = {
    "flink_valve",
    "flink_source_multiplexer",
    "hazelcast_coalescer",
    "flink_barrier_alignment",
}
"""Suites whose every step is one signal to one part of the decider.

The model has no parts, it takes whole epochs.
"""
_DECIDER_ONLY = "its steps are signals to parts of the decider, which the engine {!r} does not have"
_NO_WINDOWS = "a suite without windows; the engine {!r} is tried with windows only"


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
        """One line per case that failed, was skipped or was compared in part, and says why.

        Then the sum.
        """
        for file in self.files:
            for result in file.results:
                if result.outcome == "failed" or (skips and result.detail):
                    yield (
                        f"{result.outcome}: {file.suite}: {result.id}:"
                        f" {' '.join(result.detail.split())}"
                    )
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
                    "cases": [
                        {"id": r.id, "outcome": r.outcome, "detail": r.detail} for r in file.results
                    ],
                }
                for file in self.files
            ],
        }


def suites() -> dict[str, Callable[..., CaseResult]]:
    """File stem -> adapter, of all suites."""
    return {**frontier_suites.SUITES, **barrier_suites.SUITES, **window_suites.SUITES}


def run(files: Iterable[Path | str], engine: str = "decider") -> Report:
    """Run every case of every file.

    What an engine cannot be tried with is skipped, with the reason. On Spark the cases of a suite
    share one session, and several run at the same time.

    Raises:
        ConfigurationError: there is no such engine; a file is missing or not a case file; no file
            is of a known suite.
    """
    if engine not in ENGINES:
        raise ConfigurationError(
            f"no adapters for engine {engine!r}",
            code="conformance.engine",
            advice=f"choose one of {', '.join(ENGINES)}",
        )
    documents = [
        (Path(file), *_open(Path(file))) for file in files
    ]  # all of them first: a bad file costs no run
    if documents and all(suite is None for _, suite, _ in documents):
        known = f"known suites: {', '.join(sorted(suites()))}"
        named = ", ".join(str(path) for path, _, _ in documents)
        raise ConfigurationError(
            f"{named}: no adapter for a suite of this name",
            code="conformance.unknown_suite",
            advice=known,
        )
    with benches(engine):
        return Report(
            engine,
            tuple(_run_file(path, suite, document, engine) for path, suite, document in documents),
        )


def _open(path: Path) -> tuple[str | None, Mapping[str, Any]]:
    """The suite a file belongs to (its stem, or the beginning of it; None.

    No one knows it), and what it holds.
    """
    named = [
        suite
        for suite in suites()
        if path.stem == suite or path.stem.startswith((f"{suite}_", f"{suite}-", f"{suite}."))
    ]
    return max(named, key=len, default=None), _read(path)


def _run_file(
    path: Path, suite: str | None, document: Mapping[str, Any], engine: str
) -> FileReport:
    header = {key: value for key, value in document.items() if not _holds_cases(key)} | {
        "folder": str(path.parent)
    }
    cases = list(_cases(path, document))
    reason = _not_for(suite, engine)
    if suite is None or reason is not None:
        return FileReport(
            path.stem,
            tuple(CaseResult(case["id"], "skipped", reason or _NO_ADAPTER) for case in cases),
        )
    began = monotonic()
    with ThreadPoolExecutor(_AT_ONCE if engine == "spark" else 1) as pool:
        results = tuple(pool.map(lambda case: _run_case(suite, header, case, engine), cases))
    return FileReport(path.stem, results, monotonic() - began)


def _not_for(suite: str | None, engine: str) -> str | None:
    """Why a suite cannot be played on an engine.

    A pass there would be the decider's, under a wrong name.
    """
    if suite is None:
        return _NO_ADAPTER
    if engine == "spark" and suite not in window_suites.SUITES:
        return _NO_WINDOWS.format(engine)
    return _DECIDER_ONLY.format(engine) if engine == "oracle" and suite in ON_PARTS else None


def _run_case(
    suite: str, header: Mapping[str, Any], case: Mapping[str, Any], engine: str
) -> CaseResult:
    """A case is skipped for what its adapter does not know, and fails for whatever else goes wrong
    in it.
    """
    try:
        uncompared = KNOWN[suite].check(case)
        result = suites()[suite](header, case, engine)
        if result.outcome == "passed" and uncompared:
            return CaseResult(result.id, "passed", f"not compared: {', '.join(uncompared)}")
        return result
    except UnknownFeatureError as unknown:
        return CaseResult(case["id"], "skipped", str(unknown))
    except MalformedCaseError as malformed:
        return CaseResult(case["id"], "failed", f"malformed: {malformed}")
    except ValidationError as refused:
        return CaseResult(case["id"], "failed", f"refused: {refused.errors()[0]['msg']}")
    except Exception as error:
        return CaseResult(case["id"], "failed", f"{type(error).__name__}: {error}")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as a case file: {error}", code="conformance.file"
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get("cases"), list):
        raise ConfigurationError(
            f"{path} is no case file: it has no list 'cases'", code="conformance.file"
        )
    return document


def _holds_cases(key: str) -> bool:
    """Whether a key of a file holds cases; everything else is its header."""
    return key == "cases" or key.endswith("_cases") or key == "must_be_rejected"


def _cases(path: Path, document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every case of a file; those without a name of their own are numbered."""
    for name in filter(_holds_cases, document):
        found = document[name]
        if not isinstance(found, list) or not all(isinstance(case, dict) for case in found):
            raise ConfigurationError(
                f"{path} is no case file: {name!r} is no list of objects", code="conformance.file"
            )
        for number, case in enumerate(found):
            yield {**case, "id": str(case.get("id", f"{path.stem}.{name}.{number}"))}
