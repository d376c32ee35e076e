"""Pins, restore claims and condemned checkpoints: `roots.json`, changed by compare-and-swap.

Every decision over the life of a checkpoint is made in this document. A pin or a claim of a
condemned checkpoint is refused, and retention condemns nothing that is pinned or claimed, so a
restore and a retirement of one checkpoint cannot both succeed. A claim names the slot into which
its fork record goes. Once that slot is filled, the restore has succeeded or failed and the claim is
void; no clock is needed. To retire a checkpoint, retention condemns it here, puts the stub into its
slot, and then removes the entry. So after a pin or a claim succeeded, the slot shows whether the
checkpoint had been retired before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TypeVar

from tidegate.errors import PoisonError

from .bucket_layout import BucketLayout, CheckpointId, require_name
from .errors import CHECKPOINT_CONDEMNED, PIN_TAKEN
from .host_clock import SYSTEM_CLOCK, Clock
from .record_models import BucketRecord
from .shared_documents import SharedDocument, change_document, read_document
from .slot_log import SlotLog
from .store import Store

V = TypeVar("V")


class Pin(BucketRecord):
    """A name that a person gave to a checkpoint, so that it is kept; `at` in microseconds UTC."""

    checkpoint: str
    who: str
    why: str = ""
    at: int


class RestoreClaim(BucketRecord):
    """A restore under way: its fork record goes into `slot` of `timeline`.

    Void once that slot is filled. `at` is wall-clock microseconds UTC.
    """

    checkpoint: str
    timeline: int
    slot: int
    who: str
    at: int


class CondemnReason(StrEnum):
    """Why a checkpoint must not be restored."""

    DAMAGED = "damaged"  # definite evidence of `verify`
    RETIRED = "retired"  # by retention; the entry goes once the slot holds its stub


class CondemnedCheckpoint(BucketRecord):
    """A checkpoint that must not be restored or pinned; `at` in microseconds UTC."""

    reason: CondemnReason
    detail: str
    at: int


class Roots(SharedDocument):
    """The content of `roots.json`.

    Attributes:
        pins: name -> pin.
        claims: request id -> claim, void ones included until retention removes them; those of its
            earlier tries, to other checkpoints, under the id with the checkpoint.
        condemned: checkpoint id -> why it is condemned.
    """

    pins: dict[str, Pin] = {}
    claims: dict[str, RestoreClaim] = {}
    condemned: dict[str, CondemnedCheckpoint] = {}

    @property
    def protected_checkpoints(self) -> set[str]:
        """Ids of all checkpoints with a pin or a claim, void claims included."""
        return {pin.checkpoint for pin in self.pins.values()} | {
            claim.checkpoint for claim in self.claims.values()
        }

    @property
    def retiring_checkpoints(self) -> set[str]:
        """Ids of checkpoints condemned by retention whose stub may not be in place yet."""
        return {
            name for name, entry in self.condemned.items() if entry.reason is CondemnReason.RETIRED
        }

    def without_claims(self, void: set[str]) -> Roots:
        """Return the document without the claims of the requests `void`."""
        return self.model_copy(update={"claims": _drop_entries(self.claims, void)})


class RootsFile:
    """Reads and changes `roots.json` of a pipeline; no other code does."""

    def __init__(self, store: Store, pipeline: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._pipeline, self._clock = store, pipeline, clock
        self._key = BucketLayout(pipeline).roots_key

    def read(self) -> Roots:
        """Return `roots.json`, void claims of restores included.

        An empty `Roots` if there is no such document yet.
        """
        found, _ = read_document(self._store, self._key, Roots)
        return found or Roots()

    def pin(self, name: str, checkpoint: CheckpointId, *, who: str, why: str = "") -> Roots:
        """Keep a checkpoint under a name.

        The caller has checked that it is complete and not retired. The same pin again changes
        nothing.

        Raises:
            ConfigurationError: the checkpoint is condemned, another one has the name, or the name
                is not allowed.
        """
        require_name(name, "name of a pin")
        pin = Pin(checkpoint=str(checkpoint), who=who, why=why, at=self._clock.wall_ticks())

        def add_pin(roots: Roots) -> Roots:
            there = roots.pins.get(name)
            if there is not None and there.checkpoint == pin.checkpoint:
                return roots
            if there is not None:
                raise PIN_TAKEN(pipeline=self._pipeline, name=name, checkpoint=there.checkpoint)
            self._require_not_condemned(roots, checkpoint)
            return roots.model_copy(update={"pins": roots.pins | {name: pin}})

        return self._change_roots(add_pin)

    def unpin(self, name: str) -> Roots:
        """Remove a pin; does nothing if there is none."""
        return self._change_roots(
            lambda roots: roots.model_copy(update={"pins": _drop_entries(roots.pins, {name})})
        )

    def claim(
        self, request_id: str, checkpoint: CheckpointId, *, timeline: int, slot: int, who: str
    ) -> Roots:
        """Protect a checkpoint for a restore whose fork record goes into `slot` of `timeline`.

        Raises:
            ConfigurationError: the checkpoint is condemned.
        """
        claim = RestoreClaim(
            checkpoint=str(checkpoint),
            timeline=timeline,
            slot=slot,
            who=who,
            at=self._clock.wall_ticks(),
        )

        def add_claim(roots: Roots) -> Roots:
            # A restore that is repeated after a crash finds its own claim.
            there = roots.claims.get(request_id)
            if there is not None and (there.checkpoint, there.timeline, there.slot) == (
                str(checkpoint),
                timeline,
                slot,
            ):
                return roots
            self._require_not_condemned(roots, checkpoint)
            # Another try chose another checkpoint. The fork record of the first may be on its way.
            kept = {} if there is None else {f"{request_id} to {there.checkpoint}": there}
            return roots.model_copy(update={"claims": roots.claims | kept | {request_id: claim}})

        return self._change_roots(add_claim)

    def require_not_condemned(self, checkpoint: CheckpointId) -> None:
        """Refuse a checkpoint that is condemned now.

        Raises:
            ConfigurationError: it is condemned.
        """
        self._require_not_condemned(self.read(), checkpoint)

    def condemn_damaged(self, checkpoint: CheckpointId, detail: str) -> Roots:
        """Record definite evidence against a checkpoint, unless it is condemned already.

        Its pins stay, so that people can look at it.
        """
        entry = CondemnedCheckpoint(
            reason=CondemnReason.DAMAGED, detail=detail, at=self._clock.wall_ticks()
        )

        def add_condemned(roots: Roots) -> Roots:
            # The first evidence stays: it says since when the checkpoint is damaged.
            if str(checkpoint) in roots.condemned:
                return roots
            return roots.model_copy(
                update={"condemned": roots.condemned | {str(checkpoint): entry}}
            )

        return self._change_roots(add_condemned)

    def condemn_retired(self, decide: Callable[[Roots], tuple[set[str], set[str]]]) -> Roots:
        """Remove void claims and condemn checkpoints to retire, in one compare-and-swap.

        Pinned checkpoints and those under a valid claim are left out of what `decide` returns.

        Args:
            decide: gets the document, reads the log *after* it, and returns (checkpoints to retire,
                ids of void claims). It is called again if the document changed meanwhile, so no
                claim is missed.
        """
        now = self._clock.wall_ticks()

        def condemn_unprotected(roots: Roots) -> Roots:
            # Claims are judged together with the document that holds them.
            wanted, void = decide(roots)
            valid = roots.without_claims(void)
            new = {
                name: CondemnedCheckpoint(reason=CondemnReason.RETIRED, detail="retention", at=now)
                for name in wanted - valid.protected_checkpoints - roots.retiring_checkpoints
            }
            return valid.model_copy(update={"condemned": roots.condemned | new})

        return self._change_roots(condemn_unprotected)

    def clear_condemned(self, checkpoints: Iterable[str]) -> Roots:
        """Remove entries.

        Retired checkpoints whose stub is in place, or damaged ones that were repaired.
        """
        gone = set(checkpoints)
        return self._change_roots(
            lambda roots: roots.model_copy(
                update={"condemned": _drop_entries(roots.condemned, gone)}
            )
        )

    def _change_roots(self, step: Callable[[Roots], Roots]) -> Roots:
        return change_document(self._store, self._key, Roots(), step)

    def _require_not_condemned(self, roots: Roots, checkpoint: CheckpointId) -> None:
        entry = roots.condemned.get(str(checkpoint))
        if entry is not None:
            raise CHECKPOINT_CONDEMNED(
                pipeline=self._pipeline,
                checkpoint=checkpoint,
                reason=entry.reason,
                detail=entry.detail,
            )


def pin_checkpoint(
    log: SlotLog, name: str, checkpoint: CheckpointId, *, who: str, why: str = ""
) -> None:
    """Pin a complete checkpoint: put the pin first, then check that it was not retired before.

    Raises:
        ConfigurationError: it was never completed or is condemned, another one has the name, or
            the name is not allowed.
        PoisonError: it was retired; the pin is removed again.
    """
    log.open_checkpoint(checkpoint)
    roots = RootsFile(log.store, log.pipeline)
    roots.pin(name, checkpoint, who=who, why=why)
    try:
        # Retention may have retired it between the first look and the pin; from the pin on it
        # cannot.
        _ = log.open_checkpoint(checkpoint).epoch
    except PoisonError:
        roots.unpin(name)
        raise


def _drop_entries(entries: dict[str, V], gone: set[str]) -> dict[str, V]:
    return {name: entry for name, entry in entries.items() if name not in gone}
