"""Sinks that are applied at least once: files and webhooks.

The position is moved after an epoch was delivered, by compare-and-swap. A crash in between, or two
publishers at once, deliver an epoch again with the same id and the same rows, so receivers can
recognise the repetition. A restore is announced; receivers decide what to do with the rows of
abandoned epochs.
"""

import json
import os
import posixpath
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import urllib3

from tidegate.checkpoints.canonical_json import canonical_bytes
from tidegate.checkpoints.errors import BAD_STORE_URL
from tidegate.checkpoints.executor_keys import choose_task_keys
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.open_store import open_store
from tidegate.errors import ErrorDefinition, TidegateError
from tidegate.jobs.engine.arrow_tables import encode_parquet
from tidegate.jobs.spec.operations import FilesSinkSpec, WebhookSinkSpec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonObject

from .base_follower import SlotFollower, resolve_sink_address
from .errors import SINK_UNAVAILABLE, WEBHOOK_REFUSED
from .lineage_position import CurrentLineage, FollowerPosition
from .published_tables import to_json_lines

_RETRY_STATUS_CODES = (408, 425, 429)  # answers of 400 to 499 that ask to try later


class AtLeastOnceSink(SlotFollower):
    """A follower whose ledger is its position in the store."""

    def _load_position(self) -> FollowerPosition | None:
        return self.read_own_position()

    def move_position(self, before: FollowerPosition | None, after: FollowerPosition) -> None:
        """Swap the position; a new ledger never replaces one that another publisher has made."""
        super().move_position(before or after, after)

    def _apply_epoch(
        self, epoch: Manifest, before: FollowerPosition, after: FollowerPosition
    ) -> None:
        self._move_epoch(self._deliver_epoch, epoch)
        self.move_position(before, after)

    def _rewind_sink(
        self, before: FollowerPosition | None, after: FollowerPosition, lineage: CurrentLineage
    ) -> None:
        self._announce_restore(self.describe_restore(after, lineage))
        self.move_position(before, after)

    @abstractmethod
    def _deliver_epoch(self, epoch: Manifest) -> None:
        """Deliver an epoch; return when the receiver has it."""

    @abstractmethod
    def _announce_restore(self, notice: JsonObject) -> None:
        """Announce that epochs after `after_epoch` of older timelines do not count any more."""


class FilesSink(AtLeastOnceSink):
    """Writes each epoch's rows as files, then one object that names them.

    A file `<path>/<table>/t<timeline>-<epoch>-<attempt>.<format>` counts once the object
    `<path>/_epochs/<checkpoint>.json` names it; further files of the same epoch and table have
    `-<number>` before the dot. A restore is announced in
    `<path>/_restores/t<timeline>.json`. A relative path is a folder of the pipeline's store, as the
    paths of sources are.
    """

    given: FilesSinkSpec
    _folder = ""  # prefix of the keys in the target

    def _set_up(self) -> None:
        path = resolve_sink_address(self.name, "path", self.given.path)
        if "://" in path or Path(path).is_absolute():
            self._target = open_store(path, choose_task_keys(os.environ))
        else:
            # Not below the working directory: a driver that Airflow starts has another one.
            folder = posixpath.normpath(path)
            if folder.startswith(".."):
                raise BAD_STORE_URL(url=path)
            self._target, self._folder = self.store, "" if folder == "." else f"{folder}/"

    def _deliver_epoch(self, epoch: Manifest) -> None:
        files: dict[str, int] = {}
        for table in self.tables:
            for number, rows in enumerate(self.read_epoch_rows(epoch, table)):
                key = f"{table}/{epoch.id}{f'-{number}' if number else ''}.{self.given.format}"
                as_parquet = self.given.format == "parquet"
                data = encode_parquet(rows) if as_parquet else to_json_lines(rows).encode()
                self._target.put(self._folder + key, data)
                files[key] = rows.num_rows
        # Written last: readers ignore files that no such object names.
        body = self.describe_epoch(epoch) | {"files": files}
        self._target.put(f"{self._folder}_epochs/{epoch.id}.json", canonical_bytes(body))

    def _announce_restore(self, notice: JsonObject) -> None:
        key = f"{self._folder}_restores/t{notice['timeline']}.json"
        self._target.put(key, canonical_bytes(notice))


def list_local_targets(spec: PipelineSpec) -> list[str]:
    """Return the folders of this host into which sinks of files write.

    Raises:
        ConfigurationError: a path names a variable that is not set.
    """
    targets = [
        resolve_sink_address(name, "path", sink.path).removeprefix("file://")
        for name, sink in spec.sinks.items()
        if isinstance(sink, FilesSinkSpec)
    ]
    return [path for path in targets if Path(path).is_absolute()]


class WebhookSink(AtLeastOnceSink):
    """Posts the rows of each epoch as JSON.

    Requests of kind `rows` carry `{"kind": "rows", ..., "rows": [...]}`; one request of kind
    `epoch` ends each epoch. One of kind `restore` announces a restore.
    """

    given: WebhookSinkSpec

    def _set_up(self) -> None:
        self._client = urllib3.PoolManager(maxsize=1)

    def _deliver_epoch(self, epoch: Manifest) -> None:
        # The epoch that is being delivered, and those of its requests that the receiver has taken.
        # Without them, a receiver that fails now and then would never take all of a large epoch.
        if self.progress is None or self.progress[0] != str(epoch.id):
            self.progress = (str(epoch.id), set())
        about = self.describe_epoch(epoch)
        counts: dict[str, int] = {}
        for table in self.tables:
            for part, rows in enumerate(self._split_into_requests(epoch, table)):
                counts[table] = counts.get(table, 0) + rows.num_rows
                lines = [json.loads(line) for line in to_json_lines(rows).splitlines()]
                body = {**about, "kind": "rows", "table": table, "part": part, "rows": lines}
                self._post_json(body, f"{epoch.id}/{table}/{part}")
        end = {**about, "kind": "epoch", "checkpoint": str(epoch.id), "rows": counts}
        self._post_json(end, str(epoch.id))

    def _split_into_requests(self, epoch: Manifest, table: str) -> Iterator[Any]:
        for rows in self.read_epoch_rows(epoch, table):
            for begin in range(0, rows.num_rows, self.given.rows):
                yield rows.slice(begin, self.given.rows)

    def _announce_restore(self, notice: JsonObject) -> None:
        self._post_json({**notice, "kind": "restore"}, f"restore-t{notice['timeline']}")

    def _post_json(self, body: JsonObject, identity: str) -> None:
        """Send one request, unless the receiver has taken it already.

        Only an answer of 200 to 299 means that the receiver has the rows. Redirects are not
        followed: most clients repeat a redirected POST as a GET without the body.

        Raises:
            TransientError: there was no whole answer, or the receiver did not take the request.
        """
        # Large epochs take many requests: after a failure only the missing ones are sent.
        taken: set[str] = self.progress[1] if self.progress else set()
        if identity in taken:
            return
        key = f"{self.uid}/{self.name}/{identity}"
        try:
            answer = self._client.request(
                "POST",
                resolve_sink_address(self.name, "url", self.given.url),
                body=json.dumps(body).encode(),
                headers={"Content-Type": "application/json", "Idempotency-Key": key},
                timeout=self.given.timeout / 1e6,
                redirect=False,
                retries=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._receiver_error(SINK_UNAVAILABLE, str(error)) from error
        if answer.status >= 500 or answer.status in _RETRY_STATUS_CODES:
            raise self._receiver_error(SINK_UNAVAILABLE, f"answered {answer.status}")
        # Also redirects: only an answer of 2xx says that the receiver has the rows.
        if not 200 <= answer.status < 300:
            target = answer.headers.get("Location")
            redirect = f" (a redirect to {target}, which is not followed)" if target else ""
            raise self._receiver_error(
                WEBHOOK_REFUSED, f"refuses {identity} with {answer.status}{redirect}"
            )
        taken.add(identity)

    def _receiver_error(self, entry: ErrorDefinition, cause: str) -> TidegateError:
        remedy = "bring the receiver back"
        return self.make_error(entry, cause=f"the receiver {cause}", remedy=remedy)
