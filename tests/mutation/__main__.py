"""``make mutation N=400 SEED=0``: draw mutants of the trusted core and run the tests against each.

First the tests run once without a mutant, and which lines each of them executes is kept in
`artifacts/mutation-covering.json`; a test that fails there judges nothing. Then each mutant is shown
to the tests that execute its line, the quickest first, and to the simulation if they all pass. Each
result is a line of `artifacts/mutation.jsonl`. A run that was broken off goes on where it stopped,
and `--all` runs every mutant there is.

`--quick` is a first round: it leaves out the simulation and, for each mutant, the tests beyond the
first ten processor seconds, and calls what passes `unsure`. A mutant that no test can tell from the
original is answered in `equivalent.toml` with the reason. The last line is `N of N mutants killed or
answered (P %)`; the exit code is 1 below 95 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.mutation.covering import Covering, read_covering, write_covering
from tests.mutation.mutants import CORE, ROOT, Mutant, draw_mutants
from tests.mutation.run import import_libraries, judge_mutant, list_tests, record_covering
from tests.mutation.session import Session

GOAL = 0.95
RESULTS = ROOT / "artifacts" / "mutation.jsonl"
COVERING = ROOT / "artifacts" / "mutation-covering.json"
ANSWERS = Path(__file__).with_name("equivalent.toml")
_DEAD = ("killed", "timeout")


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


def cover_tests(files: Sequence[str]) -> Covering:
    """Return which lines the tests execute; only those of new or changed files are run."""
    covering = read_covering(COVERING)
    stale = [file for file in files if file not in covering.files]
    if stale:
        _say(f"{len(stale)} test files run without a mutant")
        fresh = COVERING.with_suffix(".new")
        record_covering(stale, fresh)
        covering.add(read_covering(fresh))
        write_covering(covering, COVERING)
    _say(
        f"{len(covering.tests)} tests execute the core, {covering.sum_cpu([*covering.tests]):.0f} s"
    )
    for name in covering.failed:
        _say(f"fails without a mutant, and judges nothing: {name}")
    return covering


class Judge:
    """Judges one mutant after the other, and keeps the results."""

    def __init__(self, covering: Covering, limit: float, *, quick: bool) -> None:
        self._covering, self._limit, self._quick = covering, limit, quick
        self._known, self._answers = read_results(), read_answers()
        self._session = Session(sorted(covering.files))

    def judge_all(self, mutants: Sequence[Mutant]) -> list[dict[str, Any]]:
        """Return the result of each; those of an earlier run are kept."""
        results = []
        with RESULTS.open("a") as file:
            for number, mutant in enumerate(mutants, start=1):
                result = {"key": mutant.key, **mutant.to_record(), **self._judge(mutant)}
                results.append(result)
                if result != self._known.get(mutant.key):
                    file.write(json.dumps(result) + "\n")
                    file.flush()
                what = f"{result['verdict']:8} {result.get('seconds', 0):6} s"
                _say(f"{number}/{len(mutants)} {what}  {mutant.title}")
        self._session.close()
        return results

    def _judge(self, mutant: Mutant) -> dict[str, Any]:
        if (mutant.path, mutant.before, mutant.after) in self._answers:
            return {"verdict": "answered"}
        earlier = self._known.get(mutant.key, {"verdict": ""})
        if earlier["verdict"] in (*_DEAD, *["unsure"] * self._quick):
            return earlier
        return judge_mutant(mutant, self._covering, self._session, self._limit, quick=self._quick)


def main() -> int:
    """Draw, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=180, help="seconds for one mutant")
    parser.add_argument(
        "--quick", action="store_true", help="a first round: the quickest tests only"
    )
    parser.add_argument("--all", action="store_true", help="every mutant instead of a draw")
    parser.add_argument("paths", nargs="*", default=CORE)
    given = parser.parse_args()
    count = sys.maxsize if given.all else given.count
    mutants = draw_mutants(count, given.seed, tuple(given.paths))
    RESULTS.parent.mkdir(exist_ok=True)
    import_libraries()
    with TemporaryDirectory(prefix="mutation-") as tempfile.tempdir:  # for what forks leave behind
        covering = cover_tests(list_tests())
        results = Judge(covering, given.limit, quick=given.quick).judge_all(mutants)
    survivors = [one for one in results if one["verdict"] not in (*_DEAD, "answered")]
    for one in survivors:
        place = f"{one['path']}:{one['line']} ({one['operator']})"
        _say(f"{one['verdict']}: {place}\n    - {one['before']}\n    + {one['after']}")
    good = len(results) - len(survivors)
    share = 100 * good / max(1, len(results))
    _say(f"{good} of {len(results)} mutants killed or answered ({share:.1f} %)")
    return 0 if good >= GOAL * len(results) else 1


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
