"""Before the first epoch: make sure that the checkpoint to continue from is undamaged.

To continue from the newest checkpoint needs no decision. Everything else, skipping a damaged
checkpoint included, is a restore: it writes a fork record with who and why (`docs/architecture.md`,
section 2, "Bad checkpoints").
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
from tidegate.jobs.driver.errors import CHECKPOINT_DAMAGED, NO_WHOLE_CHECKPOINT
from tidegate.jobs.spec.pipeline import PipelineSpec

_log = structlog.get_logger("tidegate.driver")


def select_start_checkpoint(
    spec: PipelineSpec, log: SlotLog, lease: Lease, recover_to: str
) -> None:
    """Leave the log with an undamaged head that is the checkpoint `recover_to` asks for.

    Raises:
        PoisonError: the newest checkpoint is damaged and the spec says ``on_bad_checkpoint: stop``,
            or all checkpoints are damaged.
        ConfigurationError: `recover_to` is not a checkpoint, or the spec does not fit its state.
    """
    write_spec(log.store, spec)
    head = log.head()
    if head.record is None or head.checkpoint is None:
        return
    if recover_to == "latest":
        verification = verify_checkpoint(log, head.checkpoint, checksums=False)
        # A store that does not answer proves nothing: only definite evidence condemns.
        if verification.verdict is not CheckpointVerdict.DAMAGED:
            _require_spec_fit(spec, log, head.record)
            return
        target = _find_undamaged_checkpoint(spec, log, verification)
        why = f"{head.checkpoint} is damaged"
    else:
        target = CheckpointCatalog(log).resolve(recover_to)
        why = f"started with recover_to={recover_to}"
    _require_spec_fit(spec, log, log.open_checkpoint(target).epoch)
    if target != head.checkpoint:
        _restore(spec, log, lease, target, why)


def _restore(
    spec: PipelineSpec, log: SlotLog, lease: Lease, target: CheckpointId, why: str
) -> None:
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
    """Log what a changed spec keeps and drops, and refuse a spec that would misread the state."""
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
    """Condemn a damaged head, and return the newest checkpoint that is undamaged."""
    first = damaged.findings[0]
    condemn_if_damaged(log, damaged)
    if spec.checkpoint.on_bad_checkpoint == "stop":
        raise CHECKPOINT_DAMAGED(
            pipeline=spec.name,
            checkpoint=damaged.checkpoint,
            problem=first.problem,
            key=first.key,
            detail=first.detail,
        )
    for row in CheckpointCatalog(log).list_checkpoints():
        if not row.is_restorable or not row.id:
            continue
        candidate = CheckpointId.parse(row.id)
        verification = verify_checkpoint(log, candidate, checksums=False)
        if verification.verdict is CheckpointVerdict.HEALTHY:
            return candidate
    raise NO_WHOLE_CHECKPOINT(pipeline=spec.name)
