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
from tests.rows_on_spark.checks import CHECKS, format_size, run_checks
from tests.rows_on_spark.evidence import Evidence
from tests.rows_on_spark.pipelines import Pipeline, list_pipelines, prepare, read_pipeline
from tests.rows_on_spark.stage import MASTERS, open_stage
from tests.servers.minio import RealMinio, running
from tidegate.errors import TidegateError
from tidegate.jobs.sinks.published_tables import export_table, read_table

_LOG_TAIL = 2000


def write_line(text: str) -> None:
    """Say it at once: a run takes minutes."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run_pipeline(
    pipeline: Pipeline, master: str, folder: Path, minio: RealMinio, out: Path | None
) -> Evidence:
    """Run one pipeline to the end of its input; on a cluster the driver has no right to rows.

    Its tables are written to `out`, if that is given.
    """
    with open_stage(folder, minio, master, with_rights=not master.startswith("local")) as stage:
        spec, command, place = prepare(pipeline, stage, folder.name)
        found = stage.run(command, place)
    store = stage.open_store(folder.name)
    if found.exit_code == 0:
        for name in spec.table_names:
            table = read_table(spec, store, name)
            found.tables[name] = table.num_rows
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                export_table(table, out / f"{name}.parquet")
    store.close()
    return found


def run_cheat(mode: str, master: str, folder: Path, minio: RealMinio) -> Evidence:
    """Run one of the planted programs."""
    with open_stage(folder, minio, master) as stage:
        copy = cheats.write_input(stage, folder.name)
        command = cheats.build_command(stage, mode, folder.name, copy)
        return stage.run(command, cheats.locate_input(stage, folder.name))


def print_row(name: str, master: str, found: Evidence, wrong: dict[str, list[str]]) -> None:
    """Print one line of the table, and the figures below it."""
    marks = (("FAIL" if wrong[check] else "ok") for check in CHECKS)
    write_line(f"{name:22s} {master:11s} " + " ".join(f"{mark:9s}" for mark in marks))
    for check, lines in wrong.items():
        for line in lines:
            write_line(f"    {check}: {line}")
    for job, pieces in found.place.indivisible.items():
        for key, size in pieces.items():
            write_line(f"    not divided: {job} of {key}, {format_size(size)}")
    if found.tables:
        written = (f"{table} {rows:,}" for table, rows in found.tables.items() if rows)
        write_line(f"    data rows: {found.read_rows:,}; in tables: {', '.join(written)}")


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
    chosen: list[Pipeline], masters: list[str], work: Path, minio: RealMinio, out: Path | None
) -> bool:
    """Run each pipeline on each master; whether all pass."""
    failed = set()
    print_heading()
    for number, pipeline in enumerate(chosen):
        for master in masters:
            folder = work / f"{number}-{masters.index(master)}"
            own = out and out / f"{pipeline.name}-{master.partition('[')[0]}"
            found = run_pipeline(pipeline, master, folder, minio, own)
            wrong = judge(found, folder)
            print_row(pipeline.name, master, found, wrong)
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
        found = run_cheat(mode, master, folder, minio)
        wrong = judge(found, folder)
        print_row(mode, master, found, wrong)
        exact[mode] = {check for check, lines in wrong.items() if lines} == {own} - {None}
    honest = exact.pop(cheats.HONEST)
    write_line(f"the honest program {'passes' if honest else 'FAILS'}")
    write_line(f"{sum(exact.values())} of {len(exact)} cheats found")
    return honest and all(exact.values())


def parse_masters(text: str) -> list[str]:
    """Masters with commas between them; `local` has two cores."""
    found = [{"local": "local[2]"}.get(name, name) for name in text.split(",")]
    if strange := set(found) - set(MASTERS):
        raise argparse.ArgumentTypeError(f"no such master: {', '.join(strange)}")
    return found


def main() -> int:
    """The command line."""
    known = {pipeline.name: pipeline for pipeline in list_pipelines()}
    parser = argparse.ArgumentParser(prog="make rows-on-spark", description=__doc__)
    parser.add_argument("pipelines", nargs="*", metavar="PIPELINE", help=", ".join(known))
    parser.add_argument(
        "--masters", nargs="+", type=parse_masters, help="local, standalone, connect"
    )
    parser.add_argument("--cheats", action="store_true", help="run the planted programs instead")
    parser.add_argument("--spec", type=Path, help="run this pipeline instead; needs --input")
    parser.add_argument(
        "--input", type=Path, help="folder with the files of --spec, each at its place in the store"
    )
    parser.add_argument("--tables", type=Path, help="write all tables as Parquet into this folder")
    given = parser.parse_args()
    if strange := set(given.pipelines) - set(known):
        parser.error(f"no such pipeline: {', '.join(sorted(strange))}; known: {', '.join(known)}")
    chosen = [known[name] for name in given.pipelines or known]
    if (given.spec is None) != (given.input is None):
        parser.error("--spec and --input belong together")
    if given.spec is not None:
        try:
            chosen = [read_pipeline(given.spec, given.input.resolve())]
        except (ValueError, TidegateError) as error:
            parser.error(str(error))
    masters = [master for some in given.masters or [MASTERS] for master in some]
    with TemporaryDirectory(prefix="tidegate-rows-") as scratch:
        work = Path(scratch)
        with running(work / "minio-files") as minio:
            if given.cheats:
                return 0 if check_cheats(masters[0], work, minio) else 1
            return 0 if check_pipelines(chosen, masters, work, minio, given.tables) else 1


if __name__ == "__main__":
    sys.exit(main())
