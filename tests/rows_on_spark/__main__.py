"""``make rows-on-spark``: run pipelines on Spark, and show that their drivers touch no row.

Each pipeline runs on each master behind a proxy that names the process of each request. Five checks
judge what is left behind; docs/architecture.md, section "What the driver may touch", says what they
look at. With ``--cheats`` the programs of `cheats` run instead, and each must be found by its own
check and by no other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.rows_on_spark import cheats
from tests.rows_on_spark.checks import CHECKS, run_checks
from tests.rows_on_spark.evidence import Evidence
from tests.rows_on_spark.pipelines import Pipeline, list_pipelines, prepare
from tests.rows_on_spark.stage import MASTERS, open_stage
from tests.servers.minio import RealMinio, running

_LOG_TAIL = 2000


def write_line(text: str) -> None:
    """Say it at once: a run takes minutes."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run_pipeline(pipeline: Pipeline, master: str, folder: Path, minio: RealMinio) -> Evidence:
    """Run one pipeline to the end of its input; on a cluster the driver has no right to rows."""
    with open_stage(folder, minio, master, with_rights=not master.startswith("local")) as stage:
        command, place = prepare(pipeline, stage, folder.name)
        return stage.run(command, place)


def run_cheat(mode: str, master: str, folder: Path, minio: RealMinio) -> Evidence:
    """Run one of the planted programs."""
    with open_stage(folder, minio, master) as stage:
        copy = cheats.write_input(stage, folder.name)
        command = cheats.build_command(stage, mode, folder.name, copy)
        return stage.run(command, cheats.locate_input(stage, folder.name))


def print_row(name: str, master: str, wrong: dict[str, list[str]]) -> None:
    """Print one line of the table, and the figures below it."""
    marks = (("FAIL" if wrong[check] else "ok") for check in CHECKS)
    write_line(f"{name:22s} {master:11s} " + " ".join(f"{mark:9s}" for mark in marks))
    for check, lines in wrong.items():
        for line in lines:
            write_line(f"    {check}: {line}")


def print_heading() -> None:
    """Print the columns of the table."""
    write_line(f"{'pipeline':22s} {'master':11s} " + " ".join(f"{check:9s}" for check in CHECKS))


def judge(found: Evidence, folder: Path) -> dict[str, list[str]]:
    """What the checks find wrong; a driver that failed passes none."""
    if found.exit_code == 0:
        return run_checks(found)
    write_line((folder / "driver.log").read_text(errors="replace")[-_LOG_TAIL:])
    return {check: [f"the driver ended with {found.exit_code}"] for check in CHECKS}


def check_pipelines(
    chosen: list[Pipeline], masters: list[str], work: Path, minio: RealMinio
) -> bool:
    """Run each pipeline on each master; whether all pass."""
    failed = set()
    print_heading()
    for number, pipeline in enumerate(chosen):
        for master in masters:
            folder = work / f"{number}-{masters.index(master)}"
            wrong = judge(run_pipeline(pipeline, master, folder, minio), folder)
            print_row(pipeline.name, master, wrong)
            if any(wrong.values()):
                failed.add(pipeline.name)
    passed = len(chosen) - len(failed)
    write_line(f"{passed} of {len(chosen)} pipelines: the driver touched 0 rows")
    return not failed


def check_cheats(master: str, work: Path, minio: RealMinio) -> bool:
    """Run the honest program and the cheats; whether each is judged as it should be."""
    print_heading()
    exact = {}
    for mode, own in {cheats.HONEST: None, **cheats.CHEATS}.items():
        folder = work / mode
        wrong = judge(run_cheat(mode, master, folder, minio), folder)
        print_row(mode, master, wrong)
        exact[mode] = {check for check, lines in wrong.items() if lines} == {own} - {None}
    honest = exact.pop(cheats.HONEST)
    write_line(f"the honest program {'passes' if honest else 'FAILS'}")
    write_line(f"{sum(exact.values())} of {len(exact)} cheats found")
    return honest and all(exact.values())


def main() -> int:
    """The command line."""
    known = {pipeline.name: pipeline for pipeline in list_pipelines()}
    parser = argparse.ArgumentParser(prog="make rows-on-spark", description=__doc__)
    parser.add_argument("pipelines", nargs="*", metavar="PIPELINE", help=", ".join(known))
    parser.add_argument("--masters", nargs="+", choices=MASTERS, default=list(MASTERS))
    parser.add_argument("--cheats", action="store_true", help="run the planted programs instead")
    given = parser.parse_args()
    if strange := set(given.pipelines) - set(known):
        parser.error(f"no such pipeline: {', '.join(sorted(strange))}; known: {', '.join(known)}")
    chosen = [known[name] for name in given.pipelines or known]
    with TemporaryDirectory(prefix="tidegate-rows-") as scratch:
        work = Path(scratch)
        with running(work / "minio-files") as minio:
            if given.cheats:
                return 0 if check_cheats(given.masters[0], work, minio) else 1
            return 0 if check_pipelines(chosen, given.masters, work, minio) else 1


if __name__ == "__main__":
    sys.exit(main())
