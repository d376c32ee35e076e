"""``make mutation N=400 SEED=0``: draw mutants of the trusted core and run the tests against each.

Each result is a line of `artifacts/mutation.jsonl`. A run that was broken off goes on where it
stopped, and `--all` runs every mutant there is. `--quick` is a first round for a busy machine: it
runs only the tests that import the mutated module, and leaves the others `unsure` for a full run. A mutant that no test can tell from the original
is answered in `equivalent.toml` with the reason. The last line is
`N of N mutants killed or answered (P %)`; the exit code is 1 below 95 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.mutation.mutants import CORE, ROOT, Mutant, draw_mutants
from tests.mutation.run import choose_tests, import_libraries, run_tests

GOAL = 0.95
RESULTS = ROOT / "artifacts" / "mutation.jsonl"
ANSWERS = Path(__file__).with_name("equivalent.toml")


def read_answers() -> dict[tuple[str, str, str], str]:
    """Return the reason for each equivalent mutant, by module, line before and line after."""
    entries = tomllib.loads(ANSWERS.read_text()).get("mutant", [])
    return {(e["path"], e["before"], e["after"]): e["reason"] for e in entries}


def read_results() -> dict[str, dict[str, Any]]:
    """Return earlier results by mutant."""
    if not RESULTS.exists():
        return {}
    found = (json.loads(line) for line in RESULTS.read_text().splitlines())
    return {entry["key"]: entry for entry in found}


def judge(
    mutant: Mutant, answers: dict[tuple[str, str, str], str], limit: float, quick: bool
) -> dict[str, Any]:
    """Return the result for one mutant."""
    if (mutant.path, mutant.before, mutant.after) in answers:
        result: dict[str, Any] = {"verdict": "answered"}
    else:
        result = run_tests(mutant.path, mutant.read_source(), limit, quick=quick)
    return {"key": mutant.key, **mutant.to_record(), **result}


def check_baseline(paths: Sequence[str], limit: float) -> bool:
    """Run the tests of each room without a mutant; return whether they pass."""
    for tests, path in {frozenset(choose_tests(path)): path for path in paths}.items():
        result = run_tests(path, (ROOT / path).read_text(), limit)
        sys.stdout.write(
            f"{path} unchanged, {len(tests)} test files: {result['verdict']}"
            f" after {result['seconds']} s\n"
        )
        sys.stdout.flush()
        if result["verdict"] != "survived":
            return False
    return True


def main() -> int:
    """Draw, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=180, help="seconds for one mutant")
    parser.add_argument(
        "--quick", action="store_true", help="first round: only the tests that import the module"
    )
    parser.add_argument(
        "--no-baseline", action="store_true", help="the tests passed on this very code before"
    )
    parser.add_argument("--all", action="store_true", help="every mutant instead of a draw")
    parser.add_argument("paths", nargs="*", default=CORE)
    given = parser.parse_args()
    count = sys.maxsize if given.all else given.count
    mutants = draw_mutants(count, given.seed, tuple(given.paths))
    known, answers = read_results(), read_answers()
    RESULTS.parent.mkdir(exist_ok=True)
    import_libraries()
    if not given.no_baseline and not check_baseline(given.paths, 4 * given.limit):
        sys.stdout.write("the tests fail without a mutant\n")
        return 2
    results = []
    with ThreadPoolExecutor(given.jobs) as pool, RESULTS.open("a") as file:

        def run(mutant: Mutant) -> dict[str, Any]:
            earlier = known.get(mutant.key)
            if earlier and earlier["verdict"] in ("killed", "timeout"):
                return earlier
            if earlier and earlier["verdict"] == "unsure" and given.quick:
                return earlier
            return judge(mutant, answers, given.limit, given.quick)

        for number, (mutant, result) in enumerate(
            zip(mutants, pool.map(run, mutants), strict=True), start=1
        ):
            results.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
            told = f"{number}/{len(mutants)} {result['verdict']:8} {result.get('seconds', 0):6} s"
            sys.stdout.write(f"{told}  {mutant.title}\n")
            sys.stdout.flush()
    survivors = [result for result in results if result["verdict"] in ("survived", "unsure")]
    for result in survivors:
        place = f"{result['path']}:{result['line']} ({result['operator']})"
        sys.stdout.write(
            f"{result['verdict']}: {place}\n    - {result['before']}\n    + {result['after']}\n"
        )
    good = len(results) - len(survivors)
    sys.stdout.write(
        f"{good} of {len(results)} mutants killed or answered"
        f" ({100 * good / max(1, len(results)):.1f} %)\n"
    )
    return 0 if good >= GOAL * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
