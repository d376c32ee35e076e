"""Is this stream well, and if not, why not: one word, one colour, and sentences for people.

Pure: no store, no Airflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tidegate.checkpoints.desired_state import DesiredDocument, DesiredState
from tidegate.checkpoints.lease import LeaseView

# Seconds; an idle stream seals clock ticks far more often, so this is a stream that hangs.
OLD_CHECKPOINT_SECONDS: Final = 120.0
# Sealed epochs that the tables do not show yet; the driver itself waits at
# `outputs.max_unpublished`.
BACKLOG_EPOCHS: Final = 20

_SILENT_SOURCES_SHOWN: Final = 3  # silent sources; where more are silent it is not theirs

_DRIVER_CONTINUES: Final = "a running driver goes on, but nothing new starts"
_STALE_DAG_TEXTS: Final = {
    "errors": (
        f"Airflow cannot read its DAG file at present (import errors): {_DRIVER_CONTINUES} until"
        " the file is mended"
    ),
    "missing": (
        "Airflow does not find its DAG, though a run of it is active (is its spec broken, or"
        f" gone?): {_DRIVER_CONTINUES}"
    ),
}

_TONE_ORDER: Final = ("off", "good", "warn", "bad")
_TONE_OF_STATE: Final = {
    "running": "good",
    "finished": "good",
    "starting": "warn",
    "waiting": "warn",
    "draining": "warn",
    "recovering": "warn",
    "failed": "bad",
    "down": "bad",
    "unknown": "bad",
    "stopped": "off",
    "new": "off",
}


def describe_state(
    desired: DesiredDocument, alive: bool, lease: LeaseView | None, status: Mapping[str, Any]
) -> tuple[str, str]:
    """The stream's state in one word, and why."""
    said = str(status.get("state") or "")
    current = lease is not None and status.get("token") == lease.token
    if desired.state is DesiredState.RECOVERING:
        return "recovering", "a restore is under way" + (
            f", started by {desired.who}" if desired.who else ""
        )
    if alive:
        if current and said in ("waiting", "starting", "draining"):
            return said, str(status.get("why") or "")
        return "running", ""
    if current and said == "failed":
        return "failed", str((status.get("error") or {}).get("message", ""))
    if current and said == "finished":
        return "finished", str(status.get("why") or "all sources are done")
    if desired.state is DesiredState.STOPPED:
        return _describe_stopped(desired, lease, status if current else {})
    return "down", "it should run, and nobody drives it"


def _describe_stopped(
    desired: DesiredDocument, lease: LeaseView | None, status: Mapping[str, Any]
) -> tuple[str, str]:
    if lease is None and not desired.at:
        return "new", "it was never started"
    told = (
        f"stopped by {desired.who}" + (f": {desired.why}" if desired.why else "")
        if desired.who
        else ""
    )
    return "stopped", str(status.get("why") or "") or told


def diagnose_stream(row: Mapping[str, Any], now: int) -> list[dict[str, str]]:
    """Everything that speaks against the stream, worst first; each with its tone.

    Empty: it is well.

    Args:
        row: the summary as the page shows it.
        now: milliseconds since 1970.
    """
    found = [{"tone": tone, "says": says} for tone, says in _find_problems(row, now)]
    return sorted(found, key=lambda finding: -_TONE_ORDER.index(finding["tone"]))


def pick_worst_tone(state: str, findings: list[dict[str, str]]) -> str:
    """One tone for the whole stream; what rests is grey unless something is wrong with it."""
    return max(
        [_TONE_OF_STATE.get(state, "bad"), *(finding["tone"] for finding in findings)],
        key=_TONE_ORDER.index,
    )


def _find_problems(row: Mapping[str, Any], now: int) -> Iterator[tuple[str, str]]:
    state, tone = row["state"], _TONE_OF_STATE.get(row["state"], "bad")
    if row["why"] and tone in ("warn", "bad"):
        yield tone, row["why"]
    elif tone == "bad":
        yield tone, f"it is {state}"
    if state == "down" and row.get("paused"):
        yield "bad", "its DAG is paused in Airflow, so nothing starts it"
    if row.get("unread"):
        yield "warn", _STALE_DAG_TEXTS[row["unread"]]
    if (
        state == "running"
        and row.get("sealed_at")
        and now - row["sealed_at"] > OLD_CHECKPOINT_SECONDS * 1000
    ):
        yield (
            "warn",
            f"the newest checkpoint is {_format_duration((now - row['sealed_at']) // 1000)} old",
        )
    if state != "waiting" and (row.get("unpublished") or 0) > BACKLOG_EPOCHS:
        yield "warn", f"{row['unpublished']} sealed epochs are not in the tables yet"
    for source, seconds in sorted((row.get("silent") or {}).items(), key=lambda item: -item[1])[
        :_SILENT_SOURCES_SHOWN
    ]:
        yield "warn", f"{source} has said nothing for {_format_duration(seconds)}"
    if row.get("trouble"):
        yield "warn", str(row["trouble"])
    yield from _find_quality_problems(row.get("quality"))


def _find_quality_problems(quality: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if not quality or quality.get("verdict") not in ("fail", "warn"):
        return
    failed = quality.get("failed") or []
    names = "; ".join(f"“{check.get('says') or check.get('id')}”" for check in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    yield (
        ("bad" if quality["verdict"] == "fail" else "warn"),
        f"quality checks failed: {names}{more}" if names else "quality checks failed",
    )


def _format_duration(seconds: int) -> str:
    return (
        f"{seconds} s"
        if seconds < 120
        else f"{seconds // 60} min"
        if seconds < 7200
        else f"{seconds // 3600} h"
    )
