"""The last lines of a run of CI: the time of each part, slow and flaky tests, those not run.

`python -m tests.ci.summary FOLDER SECONDS`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.ci.flaky_tests import (
    MAX_FLAKY,
    FlakyListError,
    judge_known_tests,
    read_commit_times,
    read_known_tests,
)
from tests.ci.run_record import RunRecord

# Minutes on a quiet machine. A slower one takes half as long again, and CI may take 90.
PART_LIMITS: Final = {"tests": 13, "end to end": 18}
WHOLE_LIMIT: Final = 40
_SLOWEST: Final = 10
_ROOT: Final = Path(__file__).parents[2]


def describe_run(record: RunRecord, seconds: int) -> Iterator[str]:
    """What a person wants to know of a run.

    Args:
        record: what the parts left.
        seconds: how long all of it took.
    """
    parts = record.read_part_times()
    yield "the time of each part:"
    yield from (f"  {part.seconds:6d} s  {part.name}" for part in parts)
    yield "the slowest tests:"
    yield from (f"  {taken:6.1f} s  {name}" for name, taken in record.list_slowest_tests(_SLOWEST))
    for part in parts:
        if part.name in PART_LIMITS and part.seconds > 60 * PART_LIMITS[part.name]:
            yield f"warning: {part.name} took more than {PART_LIMITS[part.name]} min"
    if seconds > 60 * WHOLE_LIMIT:
        yield f"warning: everything took more than {WHOLE_LIMIT} min"
    if left_out := record.read_left_out():
        files = Counter(test.partition("::")[0] for test in left_out)
        yield f"NOT RUN, because the time of CI was over: {len(left_out)} tests"
        yield from (f"  {count:6d}    {file}" for file, count in files.items())
    flaky = record.read_flaky_tests()
    yield from (f"flaky: {test.name}" for test in flaky)
    yield f"flaky tests: {len(flaky)}, at most {MAX_FLAKY} are forgiven"


def check_known_tests() -> int:
    """Print what is wrong with tests/flaky.toml; return the exit code."""
    try:
        known = read_known_tests(_ROOT / "tests" / "flaky.toml")
        problems = judge_known_tests(known, read_commit_times(_ROOT)) if known else []
    except FlakyListError as error:
        known, problems = [], [str(error)]
    for problem in problems:
        print(problem)
    print(f"{len(known)} known flaky tests, {len(problems)} problem(s)")
    return 1 if problems else 0


def main(arguments: list[str]) -> int:
    """Print the summary, or check the list of known flaky tests."""
    if arguments == ["--known"]:
        return check_known_tests()
    folder, seconds = arguments
    for line in describe_run(RunRecord(Path(folder)), int(seconds)):
        print(f"ci: {line}" if not line.startswith("flaky: ") else line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
