"""The specs that wrote a pipeline's checkpoints, by digest: what a later spec is compared with."""

from __future__ import annotations

from contextlib import suppress

from pydantic import ValidationError

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.store import NotFoundError, PreconditionFailedError, Store
from tidegate.jobs.spec.changes import Change, Live, Verdict, changes
from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.jobs.spec.pipeline import PipelineSpec

__all__ = ["live_state", "read_spec", "require_fit", "spec_changes", "spec_key", "write_spec"]


def spec_key(pipeline: str, digest: str) -> str:
    """Where the spec of a digest lies."""
    return f"{pipeline}/specs/{digest}.json"


def write_spec(store: Store, spec: PipelineSpec) -> None:
    """Keep a spec, once."""
    with suppress(PreconditionFailedError):
        store.create(spec_key(spec.name, spec.digest()), spec.canonical().encode())


def read_spec(store: Store, pipeline: str, digest: str) -> PipelineSpec | None:
    """The spec of a digest; None when nobody kept it, or this version cannot read it."""
    try:
        return PipelineSpec.model_validate_json(store.get(spec_key(pipeline, digest)).data)
    except (NotFoundError, ValidationError):
        return None


def live_state(manifest: Manifest) -> Live:
    """What state a checkpoint holds."""
    kinds = {segment.kind for segment in manifest.segments if segment.rows}
    return Live(frozenset(k.removeprefix("window:") for k in kinds if k.startswith("window:")), manifest.counters.retained)


def spec_changes(store: Store, spec: PipelineSpec, manifest: Manifest) -> list[Change] | None:
    """What going on from a checkpoint under this spec keeps, drops or refuses; None when its own spec is not known."""
    if manifest.spec_digest == spec.digest():
        return []
    old = read_spec(store, spec.name, manifest.spec_digest)
    return None if old is None else changes(old, spec, live_state(manifest))


def require_fit(store: Store, spec: PipelineSpec, manifest: Manifest) -> list[Change]:
    """The changes, when all of them can be followed.

    Raises:
        ConfigurationError: one of them is refused.
    """
    found = spec_changes(store, spec, manifest) or []
    refused = [change for change in found if change.verdict is Verdict.REFUSED]
    if refused:
        raise ConfigurationError(
            f"the spec of {spec.name} does not fit the state of {manifest.id}: "
            + "; ".join(f"{change.what}: {change.why}" for change in refused),
            code="spec.does_not_fit",
            pipeline=spec.name,
            kept="the checkpoint and the tables; nothing was started or restored",
            advice="take the change back, or follow the advice above; the rules: docs/recovery.md",
        )
    return found
