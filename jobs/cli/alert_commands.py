"""`tidegate alerts`: try the receivers of a pipeline, and announce its incidents by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from . import arguments, output
from .arguments import SpecArgument, StoreOption
from .errors import NO_RECEIVER

if TYPE_CHECKING:
    from tidegate.checkpoints.incidents import Delivery

app = typer.Typer(
    no_args_is_help=True, help="Messages about incidents: try the receivers, or send what is due."
)


@app.command("test")
def send_test_alert(spec: SpecArgument, store: StoreOption = None) -> None:
    """Send a test incident, and that it is over, to every receiver in `supervision.alerts`.

    It ends no real incident, and nothing is noted in the store. The exit code is that of the last
    receiver that refuses.
    """
    from tidegate.checkpoints.alert_delivery import find_alerts, send_alert
    from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
    from tidegate.checkpoints.incidents import TEST_KIND, Delivery, Incident, build_alert
    from tidegate.errors import TidegateError

    found = arguments.find_any_spec(spec)
    alerts = find_alerts(found)
    if alerts is None:
        raise NO_RECEIVER(pipeline=found.name)
    now = SYSTEM_CLOCK.wall_ticks()
    test = Incident(
        says="this is a test of its alerts",
        since=now,
        kept="everything",
        next_step="nothing to do",
    )
    begin, end = (
        build_alert(arguments.resolve_store_url(store), found, TEST_KIND, incident)
        for incident in (test, test.model_copy(update={"gone_since": now}))
    )
    deliveries = []
    for receiver in alerts.receivers:
        try:
            send_alert(receiver, alerts, begin)
            send_alert(receiver, alerts, end)
            deliveries.append(Delivery(begin, receiver))
        except TidegateError as error:
            deliveries.append(Delivery(begin, receiver, error))
    _print_deliveries(deliveries)


@app.command("send")
def send_alerts(spec: SpecArgument, store: StoreOption = None) -> None:
    """Look at a pipeline once, as its driver and Airflow's sweep do, and send what is due.

    Run it by cron where Airflow is not to be relied on: it also finds a driver that is gone.
    """
    from tidegate.checkpoints.alert_delivery import find_alerts
    from tidegate.checkpoints.incidents import announce_incidents

    found, log = arguments.open_any_spec_and_log(spec, store)
    if not find_alerts(found):
        raise NO_RECEIVER(pipeline=found.name)
    _print_deliveries(announce_incidents(log, found))


def _print_deliveries(deliveries: Sequence[Delivery]) -> None:
    for sent in deliveries:
        if sent.error is None:
            output.print_line(f"{sent.receiver}: sent {sent.alert.title}")
        else:
            output.print_error(sent.error)
    errors = [sent.error for sent in deliveries if sent.error is not None]
    if errors:
        raise typer.Exit(errors[-1].failure_class.exit_code)
