"""Before the first epoch.

Make sure that the checkpoint to go on from is whole, or go back to one that is.

Going on from the newest is no decision. Everything else, passing over a bad checkpoint included, is
a restore: a fork record in the log, with who and why, and never silent (design.md section 2, bad
checkpoints).
"""

from __future__ import annotations

import secrets

import structlog

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.checkpoint_specs import (
    compare_spec_with_checkpoint,
    require_compatible_spec,
    write_spec,
)
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.verify import (
    CheckpointVerdict,
    Verification,
    condemn_if_damaged,
    verify_checkpoint,
)
from tidegate.errors import PoisonError
from tidegate.jobs.spec.pipeline import PipelineSpec

_log = structlog.get_logger("tidegate.driver")


def select_start_checkpoint(
    spec: PipelineSpec, log: SlotLog, lease: Lease, recover_to: str
) -> None:
    """Leave the log with a head that is whole and is what `recover_to` asks for.

    Raises:
        PoisonError: the newest checkpoint is damaged and the spec says ``on_bad_checkpoint: stop``,
            or none is whole.
        ConfigurationError: `recover_to` names no checkpoint, or the spec does not fit the state of
            the one to go on from.
    """
    write_spec(log.store, spec)
    head = log.head()
    if head.record is None or head.checkpoint is None:
        return
    if recover_to == "latest":
        found = verify_checkpoint(log, head.checkpoint, checksums=False)
        if (
            found.verdict is not CheckpointVerdict.DAMAGED
        ):  # whole, or the store could not say: only definite evidence condemns
            _require_spec_fit(spec, log, head.record)
            return
        target, why = _find_undamaged_checkpoint(spec, log, found), f"{head.checkpoint} is damaged"
    else:
        target, why = (
            CheckpointCatalog(log).resolve(recover_to),
            f"started with recover_to={recover_to}",
        )
    _require_spec_fit(spec, log, log.open_checkpoint(target).epoch)
    if target != head.checkpoint:
        plan = plan_restore(log, target)
        commit_restore(
            log,
            lease,
            plan,
            request_id=secrets.token_hex(8),
            who=f"driver {lease.holder.driver}",
            why=why,
        )
        _log.warning(
            "restored",
            pipeline=spec.name,
            to=str(target),
            epochs_rewound=plan.epochs_rewound,
            why=why,
        )


def _require_spec_fit(spec: PipelineSpec, log: SlotLog, manifest: Manifest) -> None:
    """Say what a changed spec keeps and drops, before anything is done.

    Refuse what would be misread.
    """
    if compare_spec_with_checkpoint(log.store, spec, manifest) is None:
        _log.warning(
            "spec_changed",
            pipeline=spec.name,
            what="unknown",
            why=f"the spec that wrote {manifest.id} was not kept",
        )
        return
    for change in require_compatible_spec(log, spec, manifest):
        _log.warning(
            "spec_changed",
            pipeline=spec.name,
            what=change.what,
            verdict=change.verdict.value,
            why=change.why,
        )


def _find_undamaged_checkpoint(
    spec: PipelineSpec, log: SlotLog, damaged: Verification
) -> CheckpointId:
    first = damaged.findings[0]
    condemn_if_damaged(log, damaged)
    if spec.checkpoint.on_bad_checkpoint == "stop":
        raise PoisonError(
            f"checkpoint {damaged.checkpoint} of {spec.name} is damaged: {first.problem}"
            f" {first.key} {first.detail}",
            code="checkpoint.damaged",
            pipeline=spec.name,
            kept="all other checkpoints and the tables as they are",
            advice=(
                f"go back to one that is whole: tidegate checkpoints restore {spec.name}"
                " latest_healthy (or let the driver do it: on_bad_checkpoint: fork)"
            ),
        )
    for row in CheckpointCatalog(log).list_checkpoints():
        candidate = CheckpointId.parse(row.id) if row.is_restorable and row.id else None
        if (
            candidate
            and verify_checkpoint(log, candidate, checksums=False).verdict
            is CheckpointVerdict.HEALTHY
        ):
            return candidate
    raise PoisonError(
        f"no checkpoint of {spec.name} is whole",
        code="checkpoint.none_whole",
        pipeline=spec.name,
        kept="everything that is left in the bucket",
        advice=(
            f"look at them: tidegate checkpoints verify {spec.name}; start anew under another name"
        ),
    )
