"""Runs the suites in a process: `python -m tidegate.expectations run SPEC.yaml --store URL`.

Exit codes: 0 pass or warn, 1 a critical check failed (named), else that of the error's class. A
relative folder `quality.suites` is looked for next to the spec, then in the working folder.
The last line on standard output is the store key of the result; with ``--json`` the only line is
the whole result in its envelope.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tidegate.json_types import JsonObject

if __name__ == "__main__":
    # GX imports all of pyspark (2 s) when it is installed; no frame here is Spark's. Whoever
    # imports this module may need it.
    sys.modules.setdefault("pyspark", None)  # type: ignore[arg-type]

from tidegate.checkpoints.open_store import open_store
from tidegate.errors import TidegateError
from tidegate.jobs.spec.loader import load_any_spec

from .quality_run import SCHEMA_VERSION, check_quality
from .suite_files import find_suites


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _build_quality_parser().parse_args(arguments)
    try:
        spec, store = load_any_spec(options.spec), open_store(options.store)
        spec = find_suites(spec, Path(options.spec).parent)
        result = check_quality(spec, store)
    except TidegateError as error:
        print(error, file=sys.stderr)  # noqa: T201
        if options.json:
            _print_envelope("error", error.as_dict())
        return error.failure_class.exit_code
    if options.json:
        _print_envelope("quality", result)
    else:
        print(format_report(result, store.uri(result["docs"])))  # noqa: T201
        print(result["key"])  # noqa: T201
    return 1 if result["verdict"] == "fail" else 0


def _print_envelope(kind: str, data: JsonObject) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, "kind": kind, "data": data}))  # noqa: T201


def format_report(result: JsonObject, docs: str) -> str:
    """Return the result as text for people: the verdict, and every failed check with its values."""
    failed = result["failed"]
    lines = [
        f"{result['pipeline']}: {result['verdict']} ({len(result['checks'])} checks, {len(failed)}"
        " failed)"
    ]
    lines.append(f"newest checkpoint looked at: {result['checkpoint'] or 'none'}")
    for check in failed:
        lines.append(
            f"{check['severity'].upper():8} {check['suite']}.{check['id']}: {check['says']}"
        )
        lines.append(f"         seen: {check['observed']}")
        lines += [f"         row:  {_format_row(row)}" for row in check["sample"]]
        if check["command"]:
            lines.append(f"         all:  {check['command']}")
    lines.append(f"Data Docs: {docs}")
    return "\n".join(lines)


def _format_row(row: JsonObject) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items() if value not in (None, []))


def _build_quality_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tidegate.expectations", description="Quality checks of a pipeline or job."
    )
    run = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "run", help="run all suites"
    )
    run.add_argument("spec", metavar="SPEC.yaml", help="the spec")
    run.add_argument("--store", required=True, metavar="URL", help="s3://bucket/prefix or a folder")
    run.add_argument(
        "--json", action="store_true", help="print the whole result as one line of JSON"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
