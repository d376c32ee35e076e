"""Files and webhooks.

At least once, with the epoch's id; restores are announced; a receiver that is away is waited for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
from tests.sinks.conftest import UID, World, make_spec
from tests.sinks.elsewhere import run_elsewhere

from tidegate.checkpoints.local_store import LocalStore
from tidegate.errors import ConfigurationError, PoisonError, TransientError
from tidegate.jobs.sinks.base_follower import SlotFollower, resolve_sink_address
from tidegate.jobs.sinks.errors import LedgerMovedError
from tidegate.jobs.sinks.factory import make_sinks
from tidegate.jobs.sinks.files_webhook import AtLeastOnceSink, FilesSink
from tidegate.jobs.sinks.lineage_position import FollowerPosition
from tidegate.jobs.spec.loader import parse_spec

_GARBAGE, _CUT = -1, -2  # answers that are not HTTP, and that end before their announced length


class Receiver(ThreadingHTTPServer):
    """Remembers what it was sent, and answers as the test says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[int] = []
        self.gets = 0
        self.url = f"http://127.0.0.1:{self.server_port}/hook"

    def epochs(self) -> list[int]:
        """Of every notice that an epoch is complete."""
        return [body["epoch"] for _, body in self.got if body["kind"] == "epoch"]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        """Note it."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        code = self.server.answers.pop(0) if self.server.answers else 200
        if code == 200:
            self.server.got.append((self.headers["Idempotency-Key"], body))
        if code == _GARBAGE:
            self.wfile.write(b"not http at all\r\n\r\n")
            return
        self.send_response(200 if code == _CUT else code)
        if 300 <= code < 400:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        if code == _CUT:
            self.send_header("Content-Length", "100")
        self.end_headers()

    def do_GET(self) -> None:
        """Count it: a sink never gets."""
        self.server.gets += 1
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def world_with(tmp_path: Path, **given: Any) -> tuple[World, SlotFollower]:
    """A log and one sink that follows it."""
    world = World(
        LocalStore(tmp_path / "store"),
        tmp_path / "work",
        make_spec(sinks={"out": {"tables": ["events"], **given}}),
    )
    return world, follower(world)


def follower(world: World) -> SlotFollower:
    """Another publisher of the same sink."""
    run = partial(run_elsewhere, world.store)
    made = make_sinks(world.spec, world.store, UID, run)[1]
    assert isinstance(made, SlotFollower)
    return made


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_are_named_after_their_epoch(tmp_path: Path, kind: str) -> None:
    """A file per epoch and table; the epoch's own object names them and comes last."""
    world, sink = world_with(tmp_path, kind="files", path=str(tmp_path / "out"), format=kind)
    last = world.seal(2)
    assert sink.follow(world.log) == 2
    record = json.loads((tmp_path / "out" / "_epochs" / f"{last.id}.json").read_text())
    (key, rows), *more = record["files"].items()
    assert (rows, more, record["epoch"]) == (2, [], 2)
    written = tmp_path / "out" / key
    count = (
        pq.read_table(written).num_rows
        if kind == "parquet"
        else len(written.read_text().splitlines())
    )
    assert count == rows


def test_a_relative_path_is_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a driver was started, a relative folder is the same, as for sources."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        world, sink = world_with(tmp_path / folder, kind="files", path="./exports/")
        world.seal(1)
        sink.follow(world.log)
        (named,) = (tmp_path / folder / "store" / "exports" / "_epochs").iterdir()
        files = json.loads(named.read_bytes())["files"]
        assert all((named.parent.parent / file).exists() for file in files)
        assert not (tmp_path / folder / "exports").exists()
    with pytest.raises(ConfigurationError):
        world_with(tmp_path, kind="files", path="../exports")


def test_a_repetition_overwrites_itself(tmp_path: Path) -> None:
    """Delivered, and then a crash before the mark: delivered again under the same name."""
    world, sink = world_with(tmp_path, kind="files", path=str(tmp_path / "out"))
    world.seal(1)
    with (
        patch.object(FilesSink, "move_position", side_effect=[None, KeyboardInterrupt]),
        pytest.raises(KeyboardInterrupt),
    ):
        sink.follow(world.log)
    assert follower(world).follow(world.log) == 1
    assert len(list((tmp_path / "out" / "events").iterdir())) == 1


def test_a_webhook_is_sent_rows_and_the_end_of_each_epoch(
    tmp_path: Path, receiver: Receiver
) -> None:
    """In parts, with an id for each; the end tells how many rows there were."""
    world, sink = world_with(tmp_path, kind="webhook", url=receiver.url, rows=2)
    made = world.seal(1, rows=3)
    sink.follow(world.log)
    keys = [key.removeprefix(f"{UID}/out/") for key, _ in receiver.got]
    assert keys == [f"{made.id}/events/0", f"{made.id}/events/1", str(made.id)]
    assert [len(body.get("rows", [])) for _, body in receiver.got] == [2, 1, 1]
    assert receiver.got[-1][1]["rows"] == {"events": 3}


def test_a_receiver_that_is_away_is_asked_again(tmp_path: Path, receiver: Receiver) -> None:
    """5xx and 429 are transient; another publisher sends what was sent before under the same id."""
    world, sink = world_with(tmp_path, kind="webhook", url=receiver.url)
    world.seal(2)
    for answers in ([200, 503], [429]):
        receiver.answers = list(answers)
        with pytest.raises(TransientError, match=f"answered {answers[-1]}"):
            sink.follow(world.log)
    assert follower(world).follow(world.log) == 2
    keys = [key for key, _ in receiver.got]
    assert receiver.epochs() == [1, 2]
    assert len(keys) == len(set(keys)) + 1


def test_a_refusal_is_tried_again_much_later(tmp_path: Path, receiver: Receiver) -> None:
    """A receiver that refuses does not end the driver; one that is away is tried again sooner."""
    world, sink = world_with(tmp_path, kind="webhook", url=receiver.url)
    world.seal(1)
    receiver.answers = [403]
    with pytest.raises(TransientError, match="with 403") as refused:
        sink.follow(world.log)
    assert (refused.value.code, refused.value.retry_after) == ("sink.webhook_refused", 30.0)
    world.spec = make_spec(
        sinks={"out": {"kind": "webhook", "url": "http://127.0.0.1:1/", "tables": ["events"]}}
    )
    with pytest.raises(TransientError, match="refused") as away:
        follower(world).follow(world.log)
    assert (away.value.code, away.value.retry_after) == ("sink.unavailable", 1.0)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_a_delivery(tmp_path: Path, receiver: Receiver, code: int) -> None:
    """The sink does not follow a redirect, and delivers the rows once the receiver takes them."""
    world, sink = world_with(tmp_path, kind="webhook", url=receiver.url)
    world.seal(1)
    receiver.answers = [code]
    with pytest.raises(TransientError, match=f"{code}.*a redirect to .*elsewhere"):
        sink.follow(world.log)
    assert (receiver.got, receiver.gets) == ([], 0)
    assert sink.follow(world.log) == 1
    assert receiver.epochs() == [1]


def test_an_answer_that_is_not_http_is_tried_again(tmp_path: Path, receiver: Receiver) -> None:
    """A broken answer is an outage of the receiver, not damage of the pipeline."""
    world, sink = world_with(tmp_path, kind="webhook", url=receiver.url)
    world.seal(1)
    receiver.answers = [_GARBAGE, _CUT]
    for _ in range(2):
        with pytest.raises(TransientError, match="the receiver"):
            sink.follow(world.log)
    assert sink.follow(world.log) == 1


def test_a_large_epoch_gets_past_a_receiver_that_often_fails(
    tmp_path: Path, receiver: Receiver
) -> None:
    """The sink keeps the parts that were taken: every failure costs one request, not the epoch."""
    world, sink = world_with(tmp_path, kind="webhook", url=receiver.url, rows=1)
    world.seal(1, rows=20)
    receiver.answers = [200, 200, 200, 503] * 7
    failures = 0
    while True:
        try:
            sink.follow(world.log)
            break
        except TransientError:
            failures += 1
    keys = [key for key, _ in receiver.got]
    assert (failures, len(keys), len(set(keys))) == (6, 21, 21)


def test_a_restore_is_announced(tmp_path: Path, receiver: Receiver) -> None:
    """Before the first epoch of the new timeline.

    A publisher that missed it delivers nothing more.
    """
    world, sink = world_with(tmp_path, kind="webhook", url=receiver.url)
    first = world.seal(1)
    slept = world.seal(1)
    sink.follow(world.log)
    world.fork(first.id)
    world.seal(1)
    sink.follow(world.log)
    kinds = [
        (b["kind"], b["timeline"], b.get("after_epoch"))
        for _, b in receiver.got
        if b["kind"] != "rows"
    ]
    assert kinds == [("epoch", 0, None), ("epoch", 0, None), ("restore", 1, 1), ("epoch", 1, None)]
    with pytest.raises(LedgerMovedError):
        sink.move_position(FollowerPosition(0, 1), FollowerPosition(0, slept.slot))


def test_a_notice_says_which_epochs_count(tmp_path: Path, receiver: Receiver) -> None:
    """The lineage, also where a restore goes back to an abandoned timeline.

    A sink that begins after a restore gets the notice too.
    """
    world, sink = world_with(tmp_path, kind="webhook", url=receiver.url)
    first, second = world.seal(1), world.seal(1)
    sink.follow(world.log)
    world.fork(first.id)
    world.seal(1)
    sink.follow(world.log)
    world.fork(second.id)
    sink.follow(world.log)
    notices = [body for _, body in receiver.got if body["kind"] == "restore"]
    stretches = [
        [(s["timeline"], s["first"], s["last"]) for s in body["lineage"]] for body in notices
    ]
    assert stretches == [[(0, 1, 1), (1, 2, None)], [(0, 1, 2), (2, 3, None)]]
    world.spec = make_spec(
        sinks={"new": {"kind": "webhook", "url": receiver.url, "tables": ["events"]}}
    )
    receiver.got.clear()
    follower(world).follow(world.log)
    assert receiver.got[0][1]["lineage"] == notices[-1]["lineage"]


def test_where_it_begins(tmp_path: Path, receiver: Receiver) -> None:
    """`start: head` leaves out what is sealed.

    Without it a retired epoch is refused, with advice.
    """
    world, sink = world_with(tmp_path, kind="webhook", url=receiver.url, start="head")
    world.seal(2)
    assert sink.follow(world.log) == 0
    world.seal(1)
    assert sink.follow(world.log) == 1
    assert receiver.epochs() == [3]
    world.retire(1)
    world.spec = make_spec(sinks={"late": {"kind": "webhook", "url": receiver.url}})
    with pytest.raises(PoisonError, match="needs slot 1, which was retired"):
        follower(world).follow(world.log)


@pytest.mark.parametrize("start", ["head", "beginning"])
def test_a_publisher_that_slept_makes_no_second_ledger(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """It found none, and then another one made it and moved it: no slot is skipped or goes back."""
    world, sink = world_with(tmp_path, kind="webhook", url=receiver.url, start=start)
    world.seal(1)
    sleeper = follower(world)
    sink.follow(world.log)
    before = sink.read_own_position()
    world.seal(2)
    monkeypatch.setattr(sleeper, "_load_position", lambda: None)
    with pytest.raises(TransientError, match="kept winning"):
        sleeper.follow(world.log)
    assert sink.read_own_position() == before


def test_a_publisher_that_slept_needs_no_retired_epoch(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it read the log, another one applied the epoch, and retention retired it."""
    world, sink = world_with(tmp_path, kind="webhook", url=receiver.url)
    world.seal(1)
    sink.follow(world.log)
    world.seal(2)
    sleeper, load = follower(world), AtLeastOnceSink._load_position

    def sleep(follower: AtLeastOnceSink) -> FollowerPosition | None:
        before = load(follower)
        monkeypatch.undo()
        sink.follow(world.log)
        world.retire(2)
        return before

    monkeypatch.setattr(AtLeastOnceSink, "_load_position", sleep)
    sleeper.follow(world.log)
    assert sleeper.lag(world.log) == 0


def test_a_sink_of_another_pipeline_is_refused(tmp_path: Path, receiver: Receiver) -> None:
    """The uid in the mark tells."""
    world, sink = world_with(tmp_path, kind="webhook", url=receiver.url)
    world.seal(1)
    sink.follow(world.log)
    sink.uid = "1" * 32
    with pytest.raises(ConfigurationError, match="another pipeline"):
        sink.follow(world.log)
    with pytest.raises(ConfigurationError, match="another pipeline"):
        sink.move_position(None, FollowerPosition(0, 1))


def test_the_page_about_sinks_is_right(tmp_path: Path) -> None:
    """Its example is a spec with these sinks."""
    page = (Path(__file__).parents[2] / "docs" / "sinks.md").read_text()
    spec = parse_spec(page.split("```yaml\n")[1].split("```")[0])
    assert {name: sink.kind for name, sink in spec.sinks.items()} == {
        "warehouse": "postgres",
        "copies": "files",
        "alarm": "webhook",
    }


def test_a_slower_publisher_does_not_take_the_copy_of_a_ledger_back(tmp_path: Path) -> None:
    """Two publishers may copy the ledger of one sink in either order; the newest position stays."""
    _, sink = world_with(tmp_path, kind="files", path=str(tmp_path / "out"))
    for upto in (1, 3, 2):
        SlotFollower.move_position(sink, None, FollowerPosition(0, upto))
    assert sink.read_own_position() == FollowerPosition(0, 3)


def test_an_error_names_the_variable_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, without the characters around it; the others are put in."""
    monkeypatch.setenv("HOST", "db")
    monkeypatch.delenv("PASSWORD", raising=False)
    assert resolve_sink_address("orders", "url", "host=${HOST}") == "host=db"
    with pytest.raises(ConfigurationError) as raised:
        resolve_sink_address("orders", "url", "host=${HOST} password=${PASSWORD}")
    assert "orders" in str(raised.value)
    assert "PASSWORD" in str(raised.value)
    assert "{" not in str(raised.value)


def test_a_publisher_that_slept_before_it_read_files_needs_no_deleted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another publisher has delivered them, and retention has deleted the epoch's files since."""
    world, sleeper = world_with(tmp_path, kind="files", path=str(tmp_path / "out"))
    file = world.seal(1).files["events"][0]
    apply = sleeper._apply_epoch

    def apply_late(*given: Any) -> None:
        monkeypatch.undo()
        follower(world).follow(world.log)
        world.seal(1)
        world.retire(1)
        world.store.delete(file.key)
        apply(*given)

    monkeypatch.setattr(sleeper, "_apply_epoch", apply_late)
    assert sleeper.follow(world.log) == 1
    assert sleeper.read_own_position() == FollowerPosition(0, 2)
