"""`tidegate land`: bring what Spark can stream into a source's folder, once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.jobs.cli import context, output
from tidegate.jobs.cli.context import SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.jobs.driver.landing_log import LandingLog

__all__ = ["land_source"]


def land_source(
    pipeline: SpecArgument,
    source: Annotated[str, typer.Argument(help="a source with a 'landing' section")],
    store: StoreOption = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Spark's checkpoint folder. Default: .tidegate/landing/...")] = None,
    new_generation: Annotated[bool, typer.Option(help="The old checkpoint folder is lost: begin anew behind it.")] = False,
    until_idle: Annotated[float | None, typer.Option(help="End after this many seconds without a row.")] = None,
) -> None:
    """Run the landing query of one source until it is stopped. Rows land exactly once, whatever is killed when."""
    from tidegate.checkpoints.open import open_store
    from tidegate.jobs.driver.landing import run_landing_query, start_landing_query
    from tidegate.jobs.driver.landing_log import LandingLog
    from tidegate.jobs.driver.logs import configure_logs
    from tidegate.jobs.driver.observe import measure_landing
    from tidegate.jobs.engine.faults import read_faults_from_environment
    from tidegate.jobs.spark.session import open_session
    from tidegate.jobs.spec.errors import ConfigurationError

    spec = context.find_spec(pipeline)
    if source not in spec.sources or spec.sources[source].landing is None:
        raise ConfigurationError(
            f"{spec.name} has no source {source!r} with a 'landing' section",
            code="landing.none",
            advice=f"its sources: {', '.join(spec.sources)}",
        )
    configure_logs(json=True)
    folder = checkpoint or Path(".tidegate") / "landing" / spec.name / source
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with measure_landing(spec.name, source) as metrics:
        place = open_store(context.resolve_store_url(store))
        landing = LandingLog(
            source,
            spec.sources[source],
            place,
            folder,
            new_generation=new_generation,
            metrics=metrics,
            faults=read_faults_from_environment(),
        )
        with landing.lock_folder(), _record_landing_end(landing):
            session = open_session(spec)
            try:
                failed = run_landing_query(lambda: start_landing_query(session, spec, landing), landing, stop, until_idle)
            finally:
                session.stop()
            if failed is not None:
                failed.pipeline = spec.name
                raise failed
    output.console().print(f"{landing.landed} rows landed by this process")


@contextmanager
def _record_landing_end(landing: LandingLog) -> Iterator[None]:
    """Leave for `tidegate status` how it ended."""
    from tidegate.jobs.spec.errors import TidegateError

    try:
        yield
    except Exception as error:
        landing.report_status("failed", error.message if isinstance(error, TidegateError) else repr(error)[:400])
        raise
    landing.report_status("stopped")
