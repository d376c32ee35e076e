"""Bugs that the simulation of jobs must find: each lets a job end without evidence, or a sink part
from its query.

The faults are those of docs/track-record.md; where the product has changed since, the bug takes the
repair out.
"""

from __future__ import annotations

import argparse
import sys
from unittest.mock import patch

import structlog
from tests.simulation.job_world import JobWorld, ViolationError, run_world
from tests.simulation.planting import Mutant, Patches, reword

from tidegate.checkpoints import batch_notes, restore
from tidegate.jobs.sealed_queries import __main__ as entry_point
from tidegate.jobs.sealed_queries import job_location, job_run, sink_restore
from tidegate.jobs.sealed_queries.batch_objects import QueryObjects
from tidegate.jobs.sealed_queries.batch_sealer import BatchSealer
from tidegate.jobs.sealed_queries.seal_loop import SealLoop
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts
from tidegate.operators import page_data


def _end_without_evidence() -> Patches:
    """The script has ended, so the job has."""
    names = ("require_ends", "require_no_failure")
    return [patch.object(SealLoop, name, lambda _loop: None) for name in names]


def _overlook_failures() -> Patches:
    """Queries are not asked for their errors."""
    return [reword(SealLoop, "require_no_failure", "started.exception()", "None")]


def _forget_debts() -> Patches:
    """Only the last batches of timelines that were left tell which queries have lived."""
    return [
        patch.object(sink_restore, "_read_debts", lambda _fork: []),
        reword(sink_restore, "list_query_ids", " and not fork.sinks", ""),
        patch.object(job_run, "list_query_ids", lambda *given: sink_restore.list_query_ids(*given)),
    ]


def _leave_logs() -> Patches:
    """The log of a file sink stays as a later batch has left it."""
    return [
        patch.object(sink_restore, "_replace_log", lambda _live, _sealed: None),
        patch.object(job_run, "refuse_sink_ahead", lambda *_: None),
    ]


def _overlook_sinks_ahead() -> Patches:
    """A query starts over the log of a file sink, whatever the log holds."""
    return [patch.object(job_run, "refuse_sink_ahead", lambda *_: None)]


def _leave_functions() -> Patches:
    """Functions of the script are not called."""
    return [reword(sink_restore, "restore_sink", "callback(query, batch)", "pass"), *_renew_names()]


def _leave_tables() -> Patches:
    """Tables are not rolled back."""
    return [patch.object(sink_restore, "roll_back_table", lambda _facts, _point: None)]


def _keep_delta_numbers() -> Patches:
    """A Delta table that is rolled back still leaves out the batches that come again."""
    return [reword(sink_restore, "_roll_back_delta", "app_transactions=seen, ", "")]


def _restore_after_sleep() -> Patches:
    """A launch that slept brings the sink back that is another driver's by now."""
    text = "self._steps.require_lease()"
    return [reword(job_run.JobSession, "_start_query", text, "pass")]


def _renew_names() -> Patches:
    return [patch.object(job_run, "restore_sink", lambda *given: sink_restore.restore_sink(*given))]


def _go_by_batch_numbers() -> Patches:
    """The timeline of a commit is not looked at."""
    instead = "if False:"
    return [reword(sink_restore.SealedPoint, "is_kept", "if commit.launch is not None:", instead)]


def _publish_before_sinks() -> Patches:
    """The checkpoint is whole before the sink is brought back: a kill between leaves it ahead."""
    text = "restore_sink(facts, sealed, point, rewind)"
    early = "restored = restored and location.publish_query(name, restored)"
    return [reword(job_run.JobSession, "_start_query", text, f"{early}; {text}")]


def _go_on_anywhere() -> Patches:
    """A launch goes on in the folder of the one before, whoever held the lease in between."""
    text = "(last.token, last.timeline) == (token - 1, head.timeline)"
    renewed = patch.object(
        job_run, "open_location", lambda *given: job_location.open_location(*given)
    )
    return [reword(job_location, "open_location", text, "last.token"), renewed]


def _note_owners_late() -> Patches:
    """A launch notes itself as owner of a folder only when it has a JVM."""
    text = "_note_owners(location.folder, [ProcessIdentity.this_process()])"
    renewed = patch.object(
        job_run, "open_location", lambda *given: job_location.open_location(*given)
    )
    return [reword(job_location, "open_location", text, "pass"), renewed]


def _take_over_unknown_sinks() -> Patches:
    """A query begins below a batch number that its sink may have, whatever the sink does then."""
    return [patch.object(sink_restore, "_refuse_unknown_sink", lambda *_: None)]


def _share_pack_keys() -> Patches:
    """The next batch stores its pack under the key of that of a batch that was given up."""
    return [reword(QueryObjects, "store_files", "pack-{batch}.tar", "pack.tar")]


def _renew_attempts() -> Patches:
    """A batch that is given up has an attempt of its own, whose objects retention deletes."""
    text = "query.sealed = batch"
    instead = f"{text}; self._attempt = generate_attempt_id()"
    return [reword(BatchSealer, "seal", text, instead)]


def _outlive_python() -> Patches:
    """Nothing ends a JVM whose Python is suspended, and no one looks at what it has written."""
    return [
        patch.object(JobWorld, "end_jvm_of_frozen", lambda _world, _driver: None),
        patch.object(SealLoop, "_require_own_sink", lambda *_: None),
    ]


def _go_by_noted_rewinds() -> Patches:
    """A restore asks the newest batches what sinks can do, and not the present spec."""
    text = "at.allow_repeats() if name in repeatable else at.rewind"
    renewed = patch.object(restore, "plan_sinks", lambda *given: batch_notes.plan_sinks(*given))
    return [reword(batch_notes, "plan_sinks", text, "at.rewind"), renewed]


def _keep_memory_sinks() -> Patches:
    """A memory sink in append mode gets a checkpoint that stays."""
    return [patch.object(WriterFacts, "is_forgotten", lambda _facts: False)]


def _judge_scripts_first() -> Patches:
    """How the script has ended counts before the stop that was asked for."""
    text = "if self._stop.is_set():"
    return [reword(job_run.JobSession, "_judge_end", text, f"if failure is None and {text[3:]}")]


def _refuse_nameless() -> Patches:
    """The only query of a script needs a name too."""
    text = "if spec.name in self._loop.queries:"
    return [reword(job_run.JobSession, "_select_name", text, "if True:")]


def _look_before_first_slots() -> Patches:
    """A timeline that was left is taken to have a batch before its fork."""
    renewed = patch.object(
        job_run, "list_query_ids", lambda *given: sink_restore.list_query_ids(*given)
    )
    return [reword(sink_restore, "list_query_ids", "fork.slot > 1 and ", ""), renewed]


def _never_stall() -> Patches:
    """The thread that seals is alive, so the job is."""
    return [patch.object(SealLoop, "_refuse_stalled_query", lambda _loop: None)]


def _plan_without_end() -> Patches:
    """A query that has not planned a batch is taken to have nothing to do."""
    text = "(batch is None and not _is_trigger_active(query.facts.query))"
    return [reword(SealLoop, "_refuse_stalled_query", text, "batch is None")]


def _start_without_end() -> Patches:
    """A script may take any time to start its queries."""
    return [patch.object(job_run.JobSession, "_refuse_stalled_start", lambda _session: None)]


def _overlook_ends() -> Patches:
    """A query may end at any time."""
    text = "self._has_no_end(self.queries[name])"
    return [reword(SealLoop, "check_queries", text, "False")]


def _trust_ends() -> Patches:
    """A script that returns without a failure has finished."""
    return [patch.object(SealLoop, "require_ends", lambda _loop: None)]


def _take_root_logger() -> Patches:
    """tidegate takes the logs of libraries, so that a script's `basicConfig` does nothing."""
    return [reword(entry_point, "drive_job", "json=True, libraries=False", "json=True")]


def _call_idle_jobs_old() -> Patches:
    """A job that has sealed nothing for a while is taken for a pipeline that hangs."""
    return [reword(page_data, "_find_problems", ' and not row.get("queries")', "")]


JOB_MUTANTS = [
    Mutant("finished_without_evidence", _end_without_evidence, fault="jobs-F1"),
    Mutant("finished_after_a_failure", _overlook_failures, fault="jobs-F2"),
    Mutant("debts_forgotten", _forget_debts, fault="core-C3"),
    Mutant("logs_left", _leave_logs, fault="jobs-F3"),
    Mutant("sinks_ahead_overlooked", _overlook_sinks_ahead, fault="core-C22"),
    Mutant("functions_left", _leave_functions),
    Mutant("tables_left", _leave_tables),
    Mutant("delta_numbers_kept", _keep_delta_numbers),
    Mutant("restored_after_sleep", _restore_after_sleep),
    Mutant("numbers_decide", _go_by_batch_numbers, fault="core-C19"),
    Mutant("published_early", _publish_before_sinks),
    Mutant("any_folder", _go_on_anywhere),
    Mutant("owners_noted_late", _note_owners_late, fault="core-C18"),
    Mutant("unknown_sink_taken_over", _take_over_unknown_sinks, fault="jobs-F5"),
    Mutant("pack_key_shared", _share_pack_keys, fault="core-C2"),
    Mutant("attempt_renewed", _renew_attempts),
    Mutant("jvm_outlives_python", _outlive_python, fault="jobs-F4"),
    Mutant("noted_rewinds_decide", _go_by_noted_rewinds, fault="jobs-F6"),
    Mutant("memory_sinks_kept", _keep_memory_sinks, fault="jobs-F7"),
    Mutant("scripts_judged_first", _judge_scripts_first, fault="jobs-F9"),
    Mutant("nameless_refused", _refuse_nameless, fault="jobs-F11"),
    Mutant("slot_before_first", _look_before_first_slots, fault="core-C11"),
    Mutant("never_stalled", _never_stall, fault="ops-V5"),
    Mutant("plans_without_end", _plan_without_end, fault="ops-V5"),
    Mutant("starts_without_end", _start_without_end, fault="ops-V5"),
    Mutant("ends_overlooked", _overlook_ends, fault="ops-V6"),
    Mutant("ends_trusted", _trust_ends, fault="ops-V7"),
    Mutant("root_logger_taken", _take_root_logger, fault="jobs-F8"),
    Mutant("idle_jobs_old", _call_idle_jobs_old, fault="ops-V12"),
]


def hunt_in_jobs(mutant: Mutant, worlds: int) -> int | None:
    """Return the first seed whose history shows a planted bug; None if none of them does."""
    patches = mutant.make()
    for one in patches:
        one.start()
    try:
        for seed in range(worlds):
            try:
                run_world(seed)
            except ViolationError:
                return seed
    finally:
        for one in reversed(patches):
            one.stop()
    return None


def main() -> int:
    """``make jobs-soak``: run histories, then hunt each planted bug; return 1 if one is missed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--worlds", type=int, default=200)
    worlds = parser.parse_args().worlds
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    for seed in range(worlds):
        run_world(seed)
    missed = 0
    for mutant in JOB_MUTANTS:
        seed_found = hunt_in_jobs(mutant, worlds)
        missed += seed_found is None
        found = "missed" if seed_found is None else f"found by seed {seed_found}"
        sys.stdout.write(f"{mutant.name:28} {found}\n")
    total = len(JOB_MUTANTS)
    sys.stdout.write(f"{worlds} histories, 0 violations; {total} planted bugs, {missed} missed\n")
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
