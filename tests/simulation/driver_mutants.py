"""Bugs in the driver, its sources and streams, and on Airflow's side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.simulation.planting import Mutant, reword

from tidegate.errors import TidegateError
from tidegate.jobs.driver.epoch_loop import EpochLoop
from tidegate.jobs.driver.housekeeping import Housekeeper
from tidegate.jobs.driver.operator_requests import RequestInbox
from tidegate.jobs.driver.startup import LeaderElection
from tidegate.jobs.driver.status_reporter import StatusReporter
from tidegate.jobs.engine.epoch_engine import Engine
from tidegate.jobs.engine.interfaces import Slice
from tidegate.jobs.sources.arrival_log import ArrivalLog
from tidegate.jobs.streams.stream_state import ReducerStateStore
from tidegate.operators import liveness, recover_and_pin

_SLOT_BEFORE = '"slot": max(1, manifest.slot - 1),'


_RECORD = Slice.to_record


def _read_again(part: Any) -> dict[str, Any]:
    record = _RECORD(part)
    if "next" not in record["resume"]:  # of objects
        return record
    following = record["resume"]["next"]
    return record | {
        "resume": {"next": max(0, following - 1)} if part.end > part.start else record["resume"]
    }


def _skip_one(part: Any) -> dict[str, Any]:
    record = _RECORD(part)
    if "next" not in record["resume"]:
        return record
    return record | {
        "resume": {"next": record["resume"]["next"] + (part.end > part.start and part.pending)}
    }


_ONLY_EXPECTED = "except TidegateError as error"


def _keep_ended(engine: Engine, *rest: Any) -> Any:
    report = _SEAL_EPOCH(engine, *rest)
    ended = all(part.done for part in rest[0].order.cut.slices)
    return replace(report, ended=ended, pending=False) if report.lost else report


_SEAL_EPOCH = Engine._seal_epoch


DRIVER_MUTANTS = (
    Mutant(
        "streams: states of an attempt that lost its slot are kept",
        lambda: [
            reword(
                ReducerStateStore,
                "load",
                "if known is None or known[0] != keys:",
                "if known is None:",
            )
        ],
        focus=("lost request", "splice request"),
    ),
    Mutant(
        "objects: a lost race for the arrival log is taken for a win",
        lambda: [
            reword(
                ArrivalLog,
                "_append_or_reload",
                "self._read_all_pages()",
                "self._remember_keys(keys)",
            )
        ],
        focus=("slow", "arrival log"),
    ),
    Mutant(
        "one 403 ends a running driver",
        lambda: [
            reword(
                EpochLoop,
                "_require_passing",
                "if isinstance(error, StoreDeniedError):",
                "if False:",
            )
        ],
        focus=("denied", "plan restore"),
        fault="B7",
    ),
    Mutant(
        "refusals from before an epoch count as well",
        lambda: [
            reword(
                EpochLoop,
                "_record_outcome",
                "self._backoff, self._denied_for, self._trouble = _FIRST_BACKOFF, 0.0, None",
                "self._backoff, self._trouble = _FIRST_BACKOFF, None",
            )
        ],
        focus=("denied", "move"),
    ),
    Mutant(
        "a driver that is refused waits without end",
        lambda: [reword(EpochLoop, "_wait_and_reload", "self._denied_for += pause", "pass")],
        focus=("denied", "objects"),
    ),
    Mutant(
        "a full disk is not waited for",
        lambda: [
            reword(
                EpochLoop,
                "_require_passing",
                "full_disk = detect_full_disk(self.spec.name, error)",
                "full_disk = None",
            )
        ],
        focus=("full disk", "move"),
    ),
    Mutant(
        "a defect ends housekeeping",
        lambda: [
            reword(Housekeeper, "run_round", "except Exception as error", _ONLY_EXPECTED),
            patch.dict(Housekeeper.run_round.__globals__, {"TidegateError": TidegateError}),
        ],
        focus=("defect", "index"),
        fault="B5",
    ),
    Mutant(
        "a long step counts as stuck whatever the driver allows",
        lambda: [
            reword(
                liveness,
                "_judge_holder",
                "limit = max(limits.stall_after, step_limit)",
                "limit = 20.0",
            )
        ],
        focus=("slow disk", "survey"),
        fault="B6",
    ),
    Mutant(
        "savepoints are not acknowledged",
        lambda: [patch.object(RequestInbox, "acknowledge_applied", lambda inbox, report: None)],
        focus=("sleep", "ask"),
    ),
    Mutant(
        "the trigger takes a silent lease for a driver",
        lambda: [patch.object(liveness, "_is_lease_held", lambda lease, *_: not lease.is_free)],
        focus=("sleep", "lease"),
    ),
    Mutant(
        "the status counts another epoch",
        lambda: [reword(StatusReporter, "record_epoch", '"slot": manifest.slot,', _SLOT_BEFORE)],
    ),
    Mutant(
        "off by one in the cut: the last row again",
        lambda: [patch.object(Slice, "to_record", _read_again)],
    ),
    Mutant(
        "off by one in the cut: a row skipped",
        lambda: [patch.object(Slice, "to_record", _skip_one)],
    ),
    Mutant(
        "a finished run fails with the note that it is over",
        lambda: [
            reword(
                LeaderElection,
                "note_finished",
                "except (TransientError, FencedError, StoreDeniedError) as error",
                "except AssertionError as error",
            )
        ],
        focus=("denied", "desired"),
        fault="F26",
    ),
    Mutant(
        "a restore does not look again whether a driver has begun",
        lambda: [patch.object(recover_and_pin, "_DRIVER_BEGINS_WITHIN", None)],
        rate=0.0,
        focus=("clock jump", "look around"),
        fault="F45",
    ),
)
