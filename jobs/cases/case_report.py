"""What became of test cases, and its form as JUnit XML."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree as Xml

Verdict = Literal["passed", "failed", "bad", "recorded"]
_JUNIT_NAMES = {"failed": "failure", "bad": "error"}


@dataclass(frozen=True)
class CaseResult:
    """What became of a case.

    Attributes:
        case: its file.
        description: what it shows.
        verdict: `bad` if it could not be run as it is written.
        seconds: for reading and running it.
        problems: what differs, or is wrong in its file; each with file and line.
    """

    case: str
    description: str
    verdict: Verdict
    seconds: float
    problems: list[str] = field(default_factory=list)


def write_junit(path: Path, pipeline: str, results: Sequence[CaseResult]) -> None:
    """Write results as JUnit XML, which CI systems show.

    Raises:
        OSError: the file cannot be written.
    """
    counts = {name: str(sum(one.verdict == name for one in results)) for name in _JUNIT_NAMES}
    seconds = sum(one.seconds for one in results)
    suite = Xml.Element(
        "testsuite",
        name=pipeline,
        tests=str(len(results)),
        failures=counts["failed"],
        errors=counts["bad"],
        time=f"{seconds:.3f}",
    )
    for one in results:
        entry = Xml.SubElement(
            suite, "testcase", classname=pipeline, name=one.case, time=f"{one.seconds:.3f}"
        )
        if one.verdict in _JUNIT_NAMES:
            text = "\n".join(one.problems)
            found = Xml.SubElement(entry, _JUNIT_NAMES[one.verdict], message=one.problems[0])
            found.text = text
    suites = Xml.Element("testsuites")
    suites.append(suite)
    Xml.indent(suites)
    Xml.ElementTree(suites).write(path, encoding="utf-8", xml_declaration=True)
