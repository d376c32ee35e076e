"""Stores each spec that wrote checkpoints, and compares a later spec with them.

A spec is stored in the bucket under its digest, which the manifests name.
"""

from contextlib import suppress
from itertools import islice

from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.spec_changes import ChangeEffect, LiveState, SpecChange, compare_specs
from tidegate.jobs.spec.spec_masks import mask_secrets

from .bucket_layout import BucketLayout
from .manifest import Manifest
from .slot_log import SlotLog
from .store import NotFoundError, PreconditionFailedError, Store

_MAX_CHECKPOINTS_SEARCHED = (
    200  # checkpoints before the one asked for: a second or two, while a person waits
)


def write_spec(store: Store, spec: PipelineSpec) -> None:
    """Store a spec under its digest, without its secrets, unless it is stored already."""
    # The digest is the name, so a spec that is there already is the same one.
    with suppress(PreconditionFailedError):
        key = BucketLayout(spec.name).spec_key(spec.digest())
        store.create(key, mask_secrets(spec).canonical_json().encode())


def read_spec(store: Store, pipeline: str, digest: str) -> PipelineSpec | None:
    """Return the spec with this digest, its secrets masked.

    None if it is not stored or this version cannot read it.
    """
    try:
        data = store.get(BucketLayout(pipeline).spec_key(digest)).data
        return PipelineSpec.model_validate_json(data)
    except (NotFoundError, ValueError):
        return None


def read_newest_spec(log: SlotLog) -> PipelineSpec | None:
    """The spec that sealed the newest epoch or merge; None before the first, or as `read_spec`."""
    newest = log.head().record
    return read_spec(log.store, log.pipeline, newest.spec_digest) if newest else None


def compare_spec_with_checkpoint(
    store: Store, spec: PipelineSpec, manifest: Manifest
) -> list[SpecChange] | None:
    """Return what each change of the spec would do to the state of a checkpoint.

    Empty if the spec wrote the checkpoint; None if the spec that wrote it cannot be read.
    """
    if manifest.spec_digest == spec.digest():
        return []
    old = read_spec(store, spec.name, manifest.spec_digest)
    if old is None:
        return None
    kinds = {segment.kind for segment in manifest.segments if segment.rows}
    windows = frozenset(k.removeprefix("window:") for k in kinds if k.startswith("window:"))
    live = LiveState(windows, manifest.counters.retained)
    return compare_specs(mask_secrets(old), mask_secrets(spec), live)


def require_compatible_spec(
    log: SlotLog, spec: PipelineSpec, manifest: Manifest
) -> list[SpecChange]:
    """Return the changes of the spec since a checkpoint if a driver can continue from it with them.

    If the spec of the checkpoint cannot be read, nothing is compared and the result is empty.

    Raises:
        ConfigurationError: a change is refused. The advice names the newest of up to 200 earlier
            checkpoints that fits the spec, or the beginning if it helps; a restore to it reads the
            rows since then again.
    """
    found = compare_spec_with_checkpoint(log.store, spec, manifest) or []
    refused = _select_refused(found)
    if refused:
        raise ConfigurationError(
            f"the spec of {spec.name} does not fit the state of {manifest.id}: "
            + "; ".join(f"{change.what}: {change.why}" for change in refused),
            code="spec.does_not_fit",
            pipeline=spec.name,
            kept="the checkpoint and the tables; nothing was started or restored",
            advice=f"{_advise_way_back(log, spec, manifest)} the rules: docs/recovery.md",
        )
    return found


def _select_refused(found: list[SpecChange]) -> list[SpecChange]:
    return [change for change in found if change.verdict is ChangeEffect.REFUSED]


def _advise_way_back(log: SlotLog, spec: PipelineSpec, manifest: Manifest) -> str:
    """Return the advice: start from a checkpoint without that state, and read the rows again."""
    fitting = None
    for filled in islice(log.iterate_ancestors(manifest.id), 1, _MAX_CHECKPOINTS_SEARCHED + 1):
        if not isinstance(filled.record, Manifest):
            break  # retired, and so is everything before it
        found = compare_spec_with_checkpoint(log.store, spec, filled.record)
        if found is not None and not _select_refused(found):
            fitting = filled.record.id
            break
    old = read_spec(log.store, spec.name, manifest.spec_digest)
    if fitting is None and (old is None or _select_refused(compare_specs(old, spec, LiveState()))):
        return "take the change back, or follow the advice above;"
    where = f"{fitting}, the newest checkpoint that it fits," if fitting else "the beginning"
    command = f"tidegate checkpoints restore SPEC.yaml {fitting or 'beginning'}"
    return (
        f"take the change back, follow the advice above, or read everything since {where} again:"
        f" {command};"
    )
