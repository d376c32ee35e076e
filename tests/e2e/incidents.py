"""Ten incidents of docs/incidents.md, each recovered from the Streams page in a real Chromium.

    python -m tests.e2e.incidents [NAME...] [--pictures]     ends with "N of 10 recovered"

Airflow, MinIO, the drivers and the JVM are real; only the quality checks are replaced. An incident
counts as recovered if the page itself proves it (its panel "Is it over?") after at most 4 clicks
and 60 s. Clicks are counted on the page of the stream, and for the last incident on the list. Enter
in a form would count as one. The seconds run from the first click, or from the kill or the return
of what was away if no one has to click. Everything outside the page (a file that is edited, an
object that is replaced) is done before the first click, except for the wrong spec, where the stream
is stopped first. Afterwards the tables are compared with the input (`audit_exactness`).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.incident_recoveries import INCIDENTS, SPECS
from tests.e2e.incident_scene import GIVE_UP, Scene, Watch, list_steps, scene_of

MAX_CLICKS, MAX_SECONDS = 4, 60.0


@dataclass(frozen=True)
class Outcome:
    """One line of the result.

    Attributes:
        steps: when Airflow's tasks and the drivers began, to tell their shares of the seconds.
    """

    name: str
    clicks: int
    seconds: float
    proof: list[str] = field(default_factory=list)
    trouble: str = ""
    steps: list[str] = field(default_factory=list)

    @property
    def recovered(self) -> bool:
        return not self.trouble and self.clicks <= MAX_CLICKS and self.seconds <= MAX_SECONDS


def play(scene: Scene, name: str) -> Outcome:
    """Let one incident happen, recover from it, and compare tables and input afterwards."""
    recover, pipelines = INCIDENTS[name]
    watch, proof, trouble, seconds, steps = Watch(), [], "", GIVE_UP, []
    try:
        proof = recover(scene, watch)
        seconds = time.time() - watch.since
        steps = list_steps(scene, pipelines, watch.since)
        for pipeline in pipelines:
            trouble = trouble or scene.compare(pipeline)
    except Exception as error:
        shown = " ".join(scene.page.locator("body").inner_text().split())
        log = (scene.cockpit.stack.home / "logs" / "api-server.log").read_text(errors="replace")
        trouble = f"{type(error).__name__}: {str(error)[:300]}; the page shows: {shown[:500]}"
        trouble += f"; the end of api-server.log: {log[-3000:]}"
    finally:
        for pipeline in pipelines:
            scene.feed.hold(pipeline)
    return Outcome(name, watch.clicks, seconds, proof, trouble, steps)


def main() -> int:
    """Play the incidents that are asked for, by default all; 0 if all have recovered."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(INCIDENTS))
    parser.add_argument("--pictures", action="store_true")
    chosen = parser.parse_args()
    outcomes = []
    with (
        tempfile.TemporaryDirectory() as folder,
        scene_of(Path(folder), SPECS, chosen.pictures) as scene,
    ):
        for name in chosen.names:
            found = play(scene, name)
            outcomes.append(found)
            said = "recovered" if found.recovered else f"NOT recovered {found.trouble}"
            took = f"{found.clicks} clicks, {found.seconds:.0f} s (load {os.getloadavg()[0]:.1f})"
            sys.stdout.write(f"{name}: {said}, {took}\n")
            sys.stdout.writelines(f"    {line}\n" for line in (*found.proof, *found.steps))
            sys.stdout.flush()
    well = sum(outcome.recovered for outcome in outcomes)
    sys.stdout.write(f"{well} of {len(outcomes)} recovered\n")
    return 0 if well == len(outcomes) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
