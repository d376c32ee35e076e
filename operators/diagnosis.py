"""Is a stream well, and if not, why not: a reason, a tone and sentences for people.

Pure: no store, no Airflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tidegate.checkpoints.pipeline_overview import PipelineOverview, PipelineState

# An idle stream seals clock ticks far more often, so an older newest checkpoint means a hang.
OLD_CHECKPOINT_SECONDS: Final = 120.0
# Sealed epochs that the tables do not show yet; the driver itself waits at
# `outputs.max_unpublished`.
BACKLOG_EPOCHS: Final = 20
# If more sources are silent, the cause is not the sources.
_SILENT_SOURCES_SHOWN: Final = 3

_DRIVER_CONTINUES: Final = "a running driver goes on, but nothing new starts"
_STALE_DAG_TEXTS: Final = {
    "errors": (
        f"Airflow cannot read its DAG file at present (import errors): {_DRIVER_CONTINUES} until"
        " the file is corrected"
    ),
    "missing": (
        "Airflow does not find its DAG, though a run of it is active (is its spec broken, or"
        f" gone?): {_DRIVER_CONTINUES}"
    ),
}

_TONE_ORDER: Final = ("off", "good", "warn", "bad")
# By the page's words; every state that is not here is bad.
_TONE_OF_STATE: Final = {
    "running": "good",
    "finished": "good",
    "starting": "warn",
    "waiting": "warn",
    "draining": "warn",
    "recovering": "warn",
    "stopped": "off",
    "new": "off",
}


def explain_state(overview: PipelineOverview) -> str:
    """Why the pipeline is in its state; empty if the state says it all."""
    desired, facts = overview.desired, overview.driver.facts
    reason = str(facts.get("why") or "")
    match overview.state:
        case PipelineState.RECOVERING:
            by = f", started by {desired.who}" if desired.who else ""
            return f"a restore is under way{by}"
        case PipelineState.WAITING | PipelineState.STARTING | PipelineState.DRAINING:
            return reason
        case PipelineState.FAILED:
            return str((facts.get("error") or {}).get("message", ""))
        case PipelineState.FINISHED:
            return reason or "all sources are done"
        case PipelineState.NEW:
            return "it was never started"
        case PipelineState.STOPPED:
            told = f"stopped by {desired.who}" if desired.who else ""
            return reason or (f"{told}: {desired.why}" if told and desired.why else told)
        case PipelineState.LOST:
            return "it should run, and nobody drives it"
    return ""


def diagnose_stream(row: Mapping[str, Any], now: int) -> list[dict[str, str]]:
    """Return all problems of a stream, worst first, each with its tone; empty if it is well.

    Args:
        row: the summary as the page shows it.
        now: milliseconds since 1970.
    """
    problems = [{"tone": tone, "says": text} for tone, text in _find_problems(row, now)]
    return sorted(problems, key=lambda problem: -_TONE_ORDER.index(problem["tone"]))


def pick_worst_tone(state: str, problems: list[dict[str, str]]) -> str:
    """Return one tone for the whole stream; a stopped one is grey unless it has problems."""
    tones = [_TONE_OF_STATE.get(state, "bad"), *(problem["tone"] for problem in problems)]
    return max(tones, key=_TONE_ORDER.index)


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
    age = now - row["sealed_at"] if row.get("sealed_at") else 0  # milliseconds
    if state == "running" and age > OLD_CHECKPOINT_SECONDS * 1000:
        yield "warn", f"the newest checkpoint is {_format_duration(age // 1000)} old"
    if state != "waiting" and (row.get("unpublished") or 0) > BACKLOG_EPOCHS:
        yield "warn", f"{row['unpublished']} sealed epochs are not in the tables yet"
    silent = sorted((row.get("silent") or {}).items(), key=lambda item: -item[1])
    for source, seconds in silent[:_SILENT_SOURCES_SHOWN]:
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
    tone = "bad" if quality["verdict"] == "fail" else "warn"
    yield tone, f"quality checks failed: {names}{more}" if names else "quality checks failed"


def _format_duration(seconds: int) -> str:
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
