"""``python -m tests.conformance FILE… [--engine oracle|decider|spark] [--json]``.

Exit 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.conformance.bench import ENGINES
from tests.conformance.runner import run
from tidegate.errors import TidegateError
from tidegate.jobs.driver.log_output import configure_logs


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance", description="Run neutral case files."
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--engine", default="decider", choices=ENGINES)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args(arguments)
    try:
        report = run(options.files, options.engine)
    except TidegateError as error:
        sys.stderr.write(f"{error}\n")
        return error.failure_class.exit_code
    text = json.dumps(report.as_dict(), indent=1) if options.json else "\n".join(report.lines())
    sys.stdout.write(text + "\n")
    return 1 if report.failed else 0


if __name__ == "__main__":
    configure_logs(json=False)  # to stderr: the report alone is on stdout
    sys.exit(main())
