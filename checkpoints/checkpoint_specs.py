"""Stores each spec that wrote checkpoints, and compares a later spec with them.

A spec is stored in the bucket under its digest, which the manifests name.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from itertools import islice

from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.spec.field_rules import ChangeEffect
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.spec_changes import (
    LiveState,
    SpecChange,
    SpecHistory,
    compare_specs,
    compare_table_types,
    list_added_names,
)
from tidegate.jobs.spec.spec_masks import mask_secrets
from tidegate.jobs.spec.spec_plan import (
    PlanRow,
    PlanVerdict,
    RestoreOffer,
    SpecPlan,
    list_apart_changes,
    make_plan,
    make_plan_row,
)

from .bucket_layout import BucketLayout, CheckpointId
from .deployed_specs import read_copy, read_deployed
from .manifest import Manifest
from .slot_log import SlotLog
from .store import NotFoundError, PreconditionFailedError, Store

BEGINNING = "beginning"
"""Where a pipeline has no state; a restore to it reads every row again."""
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


class SealedSpecs:
    """The specs that wrote checkpoints of a pipeline, also those of other timelines.

    Attributes:
        log: the log of the pipeline.
        by_digest: digest and spec, secrets masked. Read when it is first asked for.
    """

    def __init__(self, log: SlotLog) -> None:
        self.log = log

    @cached_property
    def by_digest(self) -> dict[str, PipelineSpec]:
        """Those that this version can read."""
        store, layout = self.log.store, self.log.layout
        keys = [info.key for info in store.list_objects(layout.specs_prefix)]
        found = {
            digest: read_spec(store, self.log.pipeline, digest)
            for digest in map(layout.parse_spec_key, keys)
        }
        return {digest: spec for digest, spec in found.items() if spec is not None}

    def compare_with(self, spec: PipelineSpec, manifest: Manifest) -> list[SpecChange] | None:
        """Return what each change of the spec would do to the state of a checkpoint.

        Empty if the spec wrote the checkpoint; None if the spec that wrote it cannot be read.
        """
        if manifest.spec_digest == spec.digest():
            return []
        old = self.by_digest.get(manifest.spec_digest)
        if old is None:
            return None
        lineage = self._find_lineage(manifest, list_added_names(old, spec))
        history = SpecHistory([*self.by_digest.values()], lineage)
        return compare_specs(
            mask_secrets(old), mask_secrets(spec), describe_live_state(manifest), history
        )

    def _find_lineage(self, manifest: Manifest, added: set[tuple[str, str]]) -> list[PipelineSpec]:
        """Return the specs that may have sealed the epochs before a checkpoint.

        All specs where the epochs before it are retired. None, without a look at the log, if no
        spec has had what is added.
        """
        known = [*self.by_digest.values()]
        if not any(name in getattr(spec, section) for section, name in added for spec in known):
            return []
        digests: set[str] = set()
        ancestors = self.log.iterate_ancestors(manifest.id)
        for filled in islice(ancestors, _MAX_CHECKPOINTS_SEARCHED):
            if not isinstance(filled.record, Manifest):
                return known
            digests.add(filled.record.spec_digest)
        # The search has to reach the first epoch, and every spec on the way has to be readable.
        if next(ancestors, None) is not None or not digests <= self.by_digest.keys():
            return known
        return [self.by_digest[digest] for digest in sorted(digests)]


def describe_live_state(manifest: Manifest) -> LiveState:
    """Return what the rules of changes ask about the state of a checkpoint."""
    kinds = {segment.kind for segment in manifest.segments if segment.rows}

    def list_names(prefix: str) -> frozenset[str]:
        """Names of the windows or streams that have segments."""
        return frozenset(k.removeprefix(prefix) for k in kinds if k.startswith(prefix))

    return LiveState(
        windows=list_names("window:"),
        buffered=manifest.counters.retained,
        frontier=manifest.frontier_after,
        streams=list_names("buffer:"),
    )


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
    sealed = SealedSpecs(log)
    found = sealed.compare_with(spec, manifest) or []
    _refuse_changes(
        spec,
        f"the state of {manifest.id}",
        found,
        lambda: _advise_way_back(spec, manifest, sealed),
    )
    return found


def require_fitting_tables(log: SlotLog, spec: PipelineSpec) -> None:
    """Make sure that the tables can take the rows of a spec that begins without state.

    After a restore to the beginning the tables are there with the columns that they had.

    Raises:
        ConfigurationError: a column has another type than an earlier spec gave it.
    """
    found = _list_table_conflicts(log, spec)
    _refuse_changes(
        spec, "the tables", found, lambda: "take the change back, or follow the advice above;"
    )


def _refuse_changes(
    spec: PipelineSpec, state: str, found: list[SpecChange], advise: Callable[[], str]
) -> None:
    """Raise an error if a change is refused."""
    refused = _select_refused(found)
    if refused:
        raise ConfigurationError(
            f"the spec of {spec.name} does not fit {state}: "
            + "; ".join(f"{change.what}: {change.why}" for change in refused),
            code="spec.does_not_fit",
            pipeline=spec.name,
            kept="the checkpoint and the tables; nothing was started or restored",
            advice=f"{advise()} the rules: docs/recovery.md",
        )


def _select_refused(found: list[SpecChange]) -> list[SpecChange]:
    return [change for change in found if change.verdict is ChangeEffect.REFUSED]


def _advise_way_back(spec: PipelineSpec, manifest: Manifest, sealed: SealedSpecs) -> str:
    """Return the advice: start from a checkpoint without that state, and read the rows again."""
    target = find_fitting_checkpoint(spec, manifest, sealed)
    if target is None:
        return "take the change back, or follow the advice above;"
    is_checkpoint = target != BEGINNING
    where = f"{target}, the newest checkpoint that it fits," if is_checkpoint else "the beginning"
    return (
        f"take the change back, follow the advice above, or read everything since {where} again:"
        f" tidegate checkpoints restore SPEC.yaml {target};"
    )


def find_fitting_checkpoint(
    spec: PipelineSpec, manifest: Manifest, sealed: SealedSpecs
) -> CheckpointId | str | None:
    """Return where a driver could go on with a spec that does not fit a checkpoint.

    The newest of up to 200 checkpoints before it, else `BEGINNING` if the spec fits without state;
    None if it fits neither.
    """
    ancestors = sealed.log.iterate_ancestors(manifest.id)
    for filled in islice(ancestors, 1, _MAX_CHECKPOINTS_SEARCHED + 1):
        if not isinstance(filled.record, Manifest):
            break  # retired, and so is everything before it
        found = sealed.compare_with(spec, filled.record)
        if found is not None and not _select_refused(found):
            return filled.record.id
    old = sealed.by_digest.get(manifest.spec_digest)
    if old is None:
        return None
    history = SpecHistory([*sealed.by_digest.values()])
    found = compare_specs(mask_secrets(old), mask_secrets(spec), LiveState(), history)
    return None if _select_refused(found) else BEGINNING


def plan_against_log(log: SlotLog, spec: PipelineSpec) -> SpecPlan:
    """Return what a spec would do to the state of a pipeline. Only reads.

    The driver judges by the same rules when it starts.
    """
    head = log.head()
    manifest = head.record
    if manifest is None:
        return _plan_beginning(log, spec, has_tables=head.fork is not None)
    against = str(manifest.id)
    sealed = SealedSpecs(log)
    found = sealed.compare_with(spec, manifest)
    if found is None:
        why = f"the spec that wrote {against} was not kept"
        return SpecPlan(spec.name, against, (PlanRow("the spec", PlanVerdict.DEPENDS, why),))
    old = sealed.by_digest.get(manifest.spec_digest, spec)
    offer = None
    if _select_refused(found):
        target = find_fitting_checkpoint(spec, manifest, sealed)
        if target is not None:
            offer = RestoreOffer(str(target), manifest.counters.read - _count_read(log, target))
    rows = [make_plan_row(one, old, spec, is_restorable=offer is not None) for one in found]
    # The digest leaves these out, so a sealed spec does not tell which values drivers run with.
    before = _read_deployed_spec(log) or old
    rows += list_apart_changes(mask_secrets(before), mask_secrets(spec))
    return make_plan(old, spec, against, rows, offer)


def _read_deployed_spec(log: SlotLog) -> PipelineSpec | None:
    """The spec that drivers run; None if nothing is deployed, or it cannot be read."""
    with suppress(PoisonError):
        wanted = read_deployed(log.store, log.pipeline).wanted
        if wanted is not None:
            spec = read_copy(log.store, log.pipeline, wanted.digest).parse_spec()
            return spec if isinstance(spec, PipelineSpec) else None
    return None


def _plan_beginning(log: SlotLog, spec: PipelineSpec, *, has_tables: bool) -> SpecPlan:
    """The plan of a pipeline that has no state: it was never started, or is at the beginning."""
    found = _list_table_conflicts(log, spec) if has_tables else []
    rows = [make_plan_row(one, spec, spec) for one in found]
    begins = PlanRow(
        spec.name,
        PlanVerdict.BEGINS,
        "nothing is sealed: every source is read from its beginning",
        None,
        spec.table_names,
    )
    return SpecPlan(spec.name, None, (*rows, begins))


def _count_read(log: SlotLog, target: CheckpointId | str) -> int:
    """Rows that were read up to a checkpoint."""
    if not isinstance(target, CheckpointId):
        return 0
    return log.open_checkpoint(target).epoch.counters.read


def _list_table_conflicts(log: SlotLog, spec: PipelineSpec) -> list[SpecChange]:
    specs = [*SealedSpecs(log).by_digest.values()]
    return compare_table_types(mask_secrets(spec), SpecHistory(specs))
