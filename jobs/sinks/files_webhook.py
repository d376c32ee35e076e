"""Sinks that are applied at least once: files and webhooks.

Repetitions carry the id of the epoch, so that they can be told.

What was delivered is marked afterwards, by compare-and-swap. A crash in between, or two publishers
at once, deliver an epoch again: same id, same rows. A restore is told as such; what to do with the
rows of abandoned epochs is the receiver's business.
"""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
from abc import abstractmethod
from typing import Any

import pyarrow.parquet as pq

from tidegate.checkpoints.canonical_json import canonical_bytes
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.sinks.base_follower import SlotFollower, expand_variables, read_stored_position
from tidegate.jobs.sinks.lineage_position import CurrentLineage, FollowerPosition
from tidegate.jobs.sinks.published_tables import to_json_lines
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.sinks import FilesSinkSpec, WebhookSinkSpec

_RETRY_STATUS_CODES = (408, 425, 429)  # answers of 400 to 499 that mean: not now


class AtLeastOnceSink(SlotFollower):
    """The mark in the store is the ledger."""

    start: str

    def _load_position(self) -> FollowerPosition | None:
        found = read_stored_position(self.store, self.spec.name, self.name)
        if found is None:
            return None
        self.refuse_other_owner(found.uid)
        return found.position

    def _create_ledger(self, log: SlotLog, way: CurrentLineage) -> FollowerPosition:
        first = FollowerPosition(way.timeline, way.slot if self.start == "head" else 0)
        if (
            way.timeline > 0
            # A publisher that began before the restore may still deliver an epoch that does not count.
        ):
            self._announce_restore(build_restore_notice(self, first, way))
        self.move_position(None, first)
        return first

    def _apply_epoch(
        self, epoch: Manifest, before: FollowerPosition, after: FollowerPosition
    ) -> None:
        self._deliver_epoch(epoch)
        self.move_position(before, after)

    def _rewind_sink(
        self, before: FollowerPosition, after: FollowerPosition, way: CurrentLineage
    ) -> None:
        self._announce_restore(build_restore_notice(self, after, way))
        self.move_position(before, after)

    def _handle_retired_epoch(
        self, slot: int, before: FollowerPosition, way: CurrentLineage
    ) -> FollowerPosition:
        raise self.epoch_retired_error(slot)

    @abstractmethod
    def _deliver_epoch(self, epoch: Manifest) -> None:
        """Hand an epoch over; returns when the receiver has it."""

    @abstractmethod
    def _announce_restore(self, notice: dict[str, Any]) -> None:
        """Tell that the epochs after `after_epoch` of older timelines are taken back, and which epochs count from now on."""


def build_restore_notice(
    sink: SlotFollower, after: FollowerPosition, way: CurrentLineage
) -> dict[str, Any]:
    """What a receiver needs to know which of the epochs it was sent count.

    Those on the lineage of the newest timeline.
    """
    lineage = [
        {"timeline": s.timeline, "first": s.first, "last": s.last} for s in way.list_segments()
    ]
    place = {"timeline": after.timeline, "after_epoch": after.upto, "lineage": lineage}
    return {"pipeline": sink.spec.name, "uid": sink.uid, **place}


class FilesSink(AtLeastOnceSink):
    """`<path>/<table>/t<timeline>-<epoch>-<attempt>.<format>`, then `<path>/_epochs/<checkpoint>.json`, which names them.

    A file counts once the epoch's own object names it. Restores are
    `<path>/_restores/t<timeline>.json`.
    """

    def __init__(
        self, name: str, given: FilesSinkSpec, spec: PipelineSpec, store: Store, uid: str
    ) -> None:
        super().__init__(name, spec, store, uid, given.tables)
        self.start, self._format = given.start, given.format
        self._to = open_store(expand_variables(given.path, name))

    def _deliver_epoch(self, epoch: Manifest) -> None:
        files: dict[str, int] = {}
        for table in self.tables:
            for number, rows in enumerate(self.read_epoch_rows(epoch, table)):
                key = f"{table}/{epoch.id}{f'-{number}' if number else ''}.{self._format}"
                self._to.put(
                    key,
                    (
                        _encode_parquet(rows)
                        if self._format == "parquet"
                        else to_json_lines(rows).encode()
                    ),
                )
                files[key] = rows.num_rows
        body = {
            "pipeline": self.spec.name,
            "uid": self.uid,
            "timeline": epoch.timeline,
            "epoch": epoch.slot,
            "files": files,
        }
        self._to.put(f"_epochs/{epoch.id}.json", canonical_bytes(body))

    def _announce_restore(self, notice: dict[str, Any]) -> None:
        self._to.put(f"_restores/t{notice['timeline']}.json", canonical_bytes(notice))


class WebhookSink(AtLeastOnceSink):
    """POST with JSON.

    `{"kind": "rows", ..., "rows": [...]}`, and at the end of each epoch one of kind `epoch`.
    """

    def __init__(
        self, name: str, given: WebhookSinkSpec, spec: PipelineSpec, store: Store, uid: str
    ) -> None:
        super().__init__(name, spec, store, uid, given.tables)
        self.start, self._given = given.start, given

    def _deliver_epoch(self, epoch: Manifest) -> None:
        about = {
            "pipeline": self.spec.name,
            "uid": self.uid,
            "timeline": epoch.timeline,
            "epoch": epoch.slot,
        }
        counts: dict[str, int] = {}
        for table in self.tables:
            part = 0
            for rows in self.read_epoch_rows(epoch, table):
                counts[table] = counts.get(table, 0) + rows.num_rows
                for begin in range(0, rows.num_rows, self._given.rows):
                    lines = to_json_lines(rows.slice(begin, self._given.rows)).splitlines()
                    body = {
                        **about,
                        "kind": "rows",
                        "table": table,
                        "part": part,
                        "rows": [json.loads(line) for line in lines],
                    }
                    self._post_json(body, f"{epoch.id}/{table}/{part}")
                    part += 1
        self._post_json(
            {**about, "kind": "epoch", "checkpoint": str(epoch.id), "rows": counts}, str(epoch.id)
        )

    def _announce_restore(self, notice: dict[str, Any]) -> None:
        self._post_json({**notice, "kind": "restore"}, f"restore-t{notice['timeline']}")

    def _post_json(self, body: dict[str, Any], identity: str) -> None:
        """Send one request.

        Raises:
            TransientError: no answer, or one that means: later.
            ConfigurationError: the receiver refuses it.
        """
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": f"{self.uid}/{self.name}/{identity}",
        }
        request = urllib.request.Request(  # noqa: S310  # the spec admits http and https only
            expand_variables(self._given.url, self.name),
            json.dumps(body).encode(),
            headers,
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=self._given.timeout / 1e6) as answer:  # noqa: S310
                answer.read()
        except urllib.error.HTTPError as error:
            error.close()
            if 300 <= error.code < 500 and error.code not in _RETRY_STATUS_CODES:
                raise self._receiver_refused_error(identity, error.code) from error
            raise self._receiver_unavailable_error(f"answered {error.code}") from error
        except (
            OSError
        ) as error:  # URLError, time-outs and broken connections are all of this family
            raise self._receiver_unavailable_error(str(error)) from error

    def _receiver_unavailable_error(self, cause: str) -> TransientError:
        return TransientError(
            f"sink {self.name} of {self.spec.name}: the receiver {cause}",
            code="sink.unavailable",
            pipeline=self.spec.name,
            kept="everything sealed; the sink catches up later",
            advice="bring the receiver back; tidegate tries again by itself",
            retry_after=1.0,
        )

    def _receiver_refused_error(self, identity: str, code: int) -> ConfigurationError:
        return ConfigurationError(
            f"sink {self.name} of {self.spec.name}: the receiver refuses {identity} with {code}",
            code="sink.refused",
            pipeline=self.spec.name,
            kept="everything sealed",
            advice=f"mend the receiver, or sinks.{self.name}",
        )


def _encode_parquet(rows: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(rows, buffer, compression="snappy")
    return buffer.getvalue()
