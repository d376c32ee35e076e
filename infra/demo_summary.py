"""Prints the closing summary of the demo: measured figures only."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from tidegate.checkpoints.manifest import Manifest
from tidegate.infra.local_stack import Stack
from tidegate.jobs.sinks.exactness_audit import ExactnessReport

DEMO_PIPELINE = "flights"


@dataclass
class DemoResults:
    """What the demo measured.

    Attributes:
        noticed: seconds from kill -9 until Airflow has launched a new driver.
        gap: seconds from kill -9 to the first new sealed checkpoint.
        elapsed: seconds of the whole demo.
    """

    noticed: float = 0.0
    gap: float = 0.0
    elapsed: float = 0.0
    recovered_from: str = ""
    restored_to: str = ""
    stream: str = ""
    quality: dict[str, Any] = field(default_factory=dict)
    exactness: ExactnessReport = field(default_factory=ExactnessReport)
    epochs: list[Manifest] = field(default_factory=list)


def print_summary(facts: DemoResults, stack: Stack, *, keep: bool) -> None:
    """Print the summary; `keep` says whether the stack stays up and its addresses answer."""
    console = Console()
    console.print()
    console.print(_build_rows_table(facts))
    console.print(_build_figures_table(facts))
    if not keep:
        command = "make demo ARGS=--keep"
        console.print(f"The stack is going down. `{command}` leaves it running, to look around.")
        return
    links = [("Airflow", stack.airflow_url), ("Logins", str(stack.credentials_file))]
    if facts.quality.get("docs"):
        page = str(facts.quality["docs"]).removeprefix(f"{DEMO_PIPELINE}/quality/docs/")
        address = f"{stack.airflow_url}/tidegate/docs/{DEMO_PIPELINE}.quality/{page}"
        links.append(("Data Docs", address))
        links.append(("", f"{stack.store_url}/{facts.quality['docs']}"))
    links.append(("End it", f"tidegate down --home {stack.home}"))
    for name, target in links:
        console.print(f"  {name:10} {target}", soft_wrap=True, highlight=False)


def _build_rows_table(facts: DemoResults) -> Table:
    table = Table(title="Every row in exactly one place", title_justify="left")
    columns = ("read", "released", "late", "dropped", "rejected", "dead_lettered", "retained")
    table.add_column("airport")
    for column in columns:
        table.add_column(column.replace("_", "-"), justify="right")
    head = facts.epochs[-1].counters
    for source, places in sorted(facts.exactness.rows.items()):
        counted = head.per_source.get(source, {})
        values = {name: places.get(name, counted.get(name, 0)) for name in columns}
        values["retained"] = values["read"] - sum(values[name] for name in columns[1:-1])
        table.add_row(source, *(f"{values[name]:,}" for name in columns))
    return table


def _build_figures_table(facts: DemoResults) -> Table:
    table = Table(title="Figures", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value")
    counters = [epoch.epoch_counters for epoch in facts.epochs]
    emitted = sum(sum(epoch.windows.values()) for epoch in counters)
    results = sum(facts.exactness.windows.values())
    seals = [e.timings["seal_before"] for e in facts.epochs if "seal_before" in e.timings]
    totals = [sum(e.timings.values()) for e in facts.epochs]
    barriers = [b["outcome"] for e in facts.epochs for b in e.barriers]
    outcome = (
        ", ".join(f"{barriers.count(kind)} {kind}" for kind in sorted(set(barriers))) or "none"
    )
    verdict = "exact" if facts.exactness.is_exact else "; ".join(facts.exactness.problems)
    for what, value in (
        ("tables against a recomputation", verdict),
        ("windows, revisions", f"{results:,} windows, {emitted - results:,} later revisions"),
        ("barriers (day_close)", outcome),
        ("checkpoints sealed", f"{len(facts.epochs):,} on the current lineage"),
        ("epoch, median and p95", f"{_compute_median(totals):.2f} s, {_compute_p95(totals):.2f} s"),
        (
            "seal, median and p95",
            f"{_compute_median(seals) * 1000:.0f} ms, {_compute_p95(seals) * 1000:.0f} ms",
        ),
        (
            "kill -9 of the driver",
            (
                f"a new driver launched after {facts.noticed:.1f} s, first new checkpoint after"
                f" {facts.gap:.1f} s"
            ),
        ),
        ("recovered from", facts.recovered_from),
        ("restored by hand to", facts.restored_to),
        ("quality", str(facts.quality.get("verdict", "not run"))),
        ("stream ended as", facts.stream),
        ("whole demo", f"{facts.elapsed:.0f} s"),
    ):
        table.add_row(what, value)
    return table


def _compute_median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _compute_p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))] if values else 0.0
