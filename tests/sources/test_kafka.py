"""The Kafka source's plan: ranges, gaps, trims, lag.

The broker is played; tests/e2e/test_kafka.py has a real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.errors import ConfigurationError, PoisonError, TransientError
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.engine.manifest_writer import add_cut_counts
from tidegate.jobs.eventtime.decider import create_initial_state, decide, select_members_ahead
from tidegate.jobs.eventtime.decision_types import Member, MemberSurvey, Survey
from tidegate.jobs.sources.kafka_source import KafkaSource, build_consumer_settings
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits, SourceSpec
from tidegate.jobs.spec.source_options import KafkaOptions

ME = Member("web", "0")


class Broker:
    """Holds what a test says."""

    def __init__(self, **partitions: tuple[int, int]) -> None:
        self.held = {int(name[1:]): offsets for name, offsets in partitions.items()}
        self.id: str | None = "one"
        self.open: dict[int, int] = {}
        self.asked = self.identified = 0

    def read_offsets(self, *, settled: bool = True) -> Mapping[int, tuple[int, int]]:
        """What it holds now; `open` is where a partition's first open transaction begins."""
        self.asked += 1
        return {
            p: (first, self.open.get(p, end) if settled else end)
            for p, (first, end) in self.held.items()
        }

    def read_topic_id(self) -> str | None:
        """The topic's."""
        self.identified += 1
        return self.id


def spec(**kafka: Any) -> SourceSpec:
    """A topic of times and numbers."""
    return SourceSpec.model_validate(
        {
            "kind": "kafka",
            "kafka": {"servers": "b:9092", "topic": "clicks", **kafka},
            "schema": {"at": "timestamp", "n": "decimal(10,2)"},
            "event_time": "at",
            "lag": "1s",
        }
    )


def source(broker: Broker, **kafka: Any) -> KafkaSource:
    """The source, having asked once."""
    found = KafkaSource("web", spec(**kafka), broker)
    found.list_members()
    return found


def test_partitions_are_members() -> None:
    """Each partition is a member.

    One that is added later becomes one, and is read from its beginning.
    """
    broker = Broker(p0=(0, 5), p1=(2, 3))
    src = source(broker)
    assert src.list_members() == [Member("web", "0"), Member("web", "1")]
    broker.held[2] = (0, 9)
    assert src.list_members()[-1] == Member("web", "2")
    assert src.plan(Member("web", "2"), None, ReadLimits()).end == 9


def test_range_is_cut_at_the_end_and_at_the_limit() -> None:
    """A slice ends where the broker ended, or at the limit.

    What is behind is pending and counted as lag.
    """
    src = source(Broker(p0=(0, 100)))
    first = src.plan(ME, None, ReadLimits(rows=30))
    assert (first.start, first.end, first.pending, src.lag) == (0, 30, True, {"web/0": 70})
    rest = src.plan(ME, first.resume, ReadLimits())
    assert (rest.start, rest.end, rest.pending, src.lag) == (30, 100, False, {"web/0": 0})
    part = rest.parts[0]
    assert (part["kafka"]["from"], part["kafka"]["to"]) == (30, 100)
    assert part["columns"]["n"] == "decimal128(10, 2)"


def test_columns_of_the_decoder_are_not_counted_as_left_out() -> None:
    """A staged range has columns that the schema lacks; no surface may report its rows for that."""
    part = source(Broker(p0=(0, 5))).plan(ME, None, ReadLimits())
    pipeline = PipelineSpec.model_validate(
        {"name": "p", "sources": {"web": spec().model_dump(by_alias=True, exclude_unset=True)}}
    )
    counted = add_cut_counts(pipeline, Cut((part,)), EpochCounters(), {})
    assert counted.per_source == {}


def test_seq_is_the_offset() -> None:
    """Ordinal and row of a part give back the offset, beyond 32 bits as well.

    No slice crosses that border.
    """
    border = 1 << 32
    src = source(Broker(p0=(border - 2, border + 3)))
    first = src.plan(ME, None, ReadLimits())
    second = src.plan(ME, first.resume, ReadLimits())
    assert (first.end, second.start, second.end) == (border, border, border + 3)
    for part in (*first.parts, *second.parts):
        assert (part["ordinal"] << 32) + part["row_start"] == part["kafka"]["from"]
        assert (part["ordinal"] << 32) + part["row_end"] == part["kafka"]["to"]


def test_trim() -> None:
    """A barrier in the middle ends the range behind it."""
    src = source(Broker(p0=(0, 100)))
    whole = src.plan(ME, None, ReadLimits())
    short = src.trim(whole, 41)
    assert (short.end, short.resume, short.pending) == (41, {"offset": 41, "topic": "one"}, True)
    assert short.parts[0]["kafka"]["to"] == 41
    assert src.trim(whole, 100) is whole


def test_blocked_reads_nothing() -> None:
    """A blocked partition says only whether there is more."""
    part = source(Broker(p0=(0, 9))).plan(ME, {"offset": 4}, ReadLimits(), blocked=True)
    assert (part.is_empty, part.pending, part.resume) == (True, True, {"offset": 4, "topic": "one"})


def test_latest_is_remembered() -> None:
    """`start: latest` means the first look: what arrives before the first checkpoint is read."""
    broker = Broker(p0=(0, 9))
    src = source(broker, start="latest")
    assert src.plan(ME, None, ReadLimits()).is_empty
    broker.held[0] = (0, 12)
    src.list_members()
    later = src.plan(ME, None, ReadLimits())
    assert (later.start, later.end) == (9, 12)


def test_latest_is_for_a_new_topic() -> None:
    """Partitions that are added to a topic that is read begin at their first message, also in a
    driver that has just started.
    """
    broker = Broker(p0=(0, 9))
    src = source(broker, start="latest")
    assert src.plan(ME, None, ReadLimits()).end == 9
    broker.held[1] = (0, 4)
    src.list_members()
    added = Member("web", "1")
    assert [
        (p.start, p.end)
        for p in (src.plan(ME, None, ReadLimits()), src.plan(added, None, ReadLimits()))
    ] == [(9, 9), (0, 4)]
    fresh = source(broker, start="latest")
    fresh.plan(ME, {"offset": 9}, ReadLimits())
    assert (
        fresh.plan(added, None, ReadLimits()).start,
        fresh.plan(added, None, ReadLimits()).end,
    ) == (0, 4)


def test_a_position_that_was_chosen_is_sealed() -> None:
    """Another driver would choose a newer end.

    Where a topic's own beginning counts, there is nothing to keep.
    """
    assert source(Broker(p0=(0, 9)), start="latest").plan(ME, None, ReadLimits()).begins
    assert (
        not source(Broker(p0=(0, 9)), start="latest").plan(ME, {"offset": 9}, ReadLimits()).begins
    )
    assert not source(Broker(p0=(0, 9))).plan(ME, None, ReadLimits()).begins


def test_retention_before_the_first_seal() -> None:
    """What was there at the first look is not stepped over."""
    broker = Broker(p0=(0, 9))
    src = source(broker, on_gap="report")
    src.plan(ME, None, ReadLimits())
    broker.held[0] = (4, 9)
    src.list_members()
    part = src.plan(ME, None, ReadLimits())
    assert (part.start, [d.detail for d in part.dead]) == (
        0,
        ["offsets 0 to 3 were removed by retention before they were read"],
    )


def test_retention_gap_stops() -> None:
    """Offsets that are gone before they were read stop the pipeline, and are named."""
    with pytest.raises(
        PoisonError, match=r"offsets 3 to 6 of clicks partition 0 are gone"
    ) as caught:
        source(Broker(p0=(7, 9))).plan(ME, {"offset": 3}, ReadLimits())
    assert caught.value.code == "kafka.gap"


def test_retention_gap_reported() -> None:
    """With `on_gap: report` the gap is a dead letter in the slice that goes on behind it."""
    part = source(Broker(p0=(7, 9)), on_gap="report").plan(ME, {"offset": 3}, ReadLimits())
    assert (part.start, part.end, part.parts[0]["kafka"]["from"]) == (3, 9, 7)
    assert [(d.seq, d.reason) for d in part.dead] == [(3, "missing_offsets")]


def test_retention_while_reading() -> None:
    """A range that was fetched is sealed, though retention has it meanwhile.

    One of a topic that was made again is not.
    """
    broker = Broker(p0=(0, 9))
    src = source(broker)
    part = src.plan(ME, None, ReadLimits())
    broker.held[0] = (4, 9)
    assert src.find_changed_objects(part) == ()
    broker.id = "another"
    with pytest.raises(
        TransientError, match="clicks was deleted and created again while it was read"
    ):
        src.find_changed_objects(part)


def test_another_topic_of_the_same_name() -> None:
    """A topic that ends before what was read, or has another id, is not the same topic.

    Also before anything was sealed.
    """
    with pytest.raises(PoisonError, match="it is not the topic"):
        source(Broker(p0=(0, 2))).plan(ME, {"offset": 3}, ReadLimits())
    broker = Broker(p0=(0, 100))
    src = source(broker)
    resume = src.plan(ME, None, ReadLimits(rows=5)).resume
    broker.id = "two"
    src.list_members()
    for place in (resume, None):
        with pytest.raises(
            PoisonError, match="has the id two instead of one: it is not the topic"
        ) as caught:
            src.plan(ME, place, ReadLimits())
        assert caught.value.code == "kafka.truncated"
    assert src.plan(ME, {"offset": 5}, ReadLimits()).end == 100, "older checkpoints know no id"
    broker.id = None
    src.list_members()
    assert src.plan(ME, resume, ReadLimits()).resume == {"offset": 100}, "older brokers have none"


def test_open_transactions() -> None:
    """Nothing is read behind an open transaction.

    What was read there once, without isolation, does not make another topic.
    """
    broker = Broker(p0=(0, 9))
    broker.open[0] = 6
    assert source(broker).plan(ME, {"offset": 2}, ReadLimits()).end == 6
    part = source(broker).plan(ME, {"offset": 8}, ReadLimits())
    assert (part.start, part.end, part.parts) == (8, 8, ())
    with pytest.raises(PoisonError, match="ends at offset 9, but 10 was read before"):
        source(broker).plan(ME, {"offset": 10}, ReadLimits())


def test_secrets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting named env:NAME is read when it is used.

    Without the variable the message names it.
    """
    kafka = KafkaOptions(
        servers="b", topic="t", options={"ssl.key.password": "env:KEYPASS", "client.id": "x"}
    )
    monkeypatch.setenv("KEYPASS", "s3cret")
    own = {"bootstrap.servers": "b", "isolation.level": "read_committed"}
    assert build_consumer_settings(kafka) == {**own, "ssl.key.password": "s3cret", "client.id": "x"}
    monkeypatch.delenv("KEYPASS")
    with pytest.raises(ConfigurationError, match="KEYPASS is not set"):
        build_consumer_settings(kafka)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "objects"}, "go together"),
        (
            {"kafka": {"servers": "b", "topic": "t", "key": "who"}},
            "column who is not in the schema",
        ),
        ({"kafka": {"servers": "b", "topic": "t", "payload": "avro"}}, "schema_file"),
        (
            {"kafka": {"servers": "b", "topic": "t", "payload": "protobuf", "schema_file": "x"}},
            "the name of its message",
        ),
        (
            {"kafka": {"servers": "b", "topic": "t", "registry": "http://r"}},
            "for Avro and Protobuf",
        ),
        ({"bounded": True}, "a topic has no end"),
        (
            {"kafka": {"servers": "b", "topic": "t", "timestamp": "n"}},
            "column n must be a timestamp",
        ),
        (
            {"kafka": {"servers": "b", "topic": "t", "tombstones": "row"}},
            "a message without a value has no at",
        ),
        ({"kind": "objects", "kafka": None}, "needs a 'path'"),
    ],
)
def test_specs_that_are_refused(fields: dict[str, Any], message: str) -> None:
    """What does not fit together is said when the spec is read."""
    raw = spec().model_dump(by_alias=True, exclude_unset=True) | fields
    with pytest.raises(ValidationError, match=message):
        SourceSpec.model_validate(raw)


START = 1_772_323_200_000_000
SECOND = 1_000_000


def test_a_hundred_partitions() -> None:
    """Each has a frontier and a limit of its own.

    The silent one is named; the one far ahead waits; the broker is asked once.
    """
    quiet, ahead = 42, 7
    times = {p: [START + n * SECOND for n in range(1 if p == quiet else 12)] for p in range(100)}
    times[ahead] = [at + 3600 * SECOND for at in times[ahead]]
    topic = spec().model_copy(update={"limits": ReadLimits(rows=5)})
    fields = {
        "coalesce": {"idle_timeout": "never"},
        "release": {"mode": "pass_through", "max_ahead": "10m"},
    }
    raw = {
        "name": "wide",
        "sources": {"web": topic.model_dump(by_alias=True, exclude_unset=True)},
        **fields,
    }
    pipeline = PipelineSpec.model_validate(raw)
    broker = Broker(**{f"p{p}": (0, len(found)) for p, found in times.items()})
    src = KafkaSource("web", pipeline.sources["web"], broker)
    state, resume = create_initial_state(pipeline), dict.fromkeys(map(str, src.list_members()))
    took: list[dict[int, int]] = []
    for _ in range(5):
        held, asked, identified = (
            select_members_ahead(pipeline, state),
            broker.asked,
            broker.identified,
        )
        plans = [
            src.plan(m, resume[str(m)], topic.limits, blocked=m in held) for m in src.list_members()
        ]
        rows = [times[int(one.member.partition)][one.start : one.end] for one in plans]
        found = [
            MemberSurvey(
                one.member, len(r), min(r, default=None), max(r, default=None), pending=one.pending
            )
            for one, r in zip(plans, rows, strict=True)
        ]
        decision = decide(pipeline, state, Survey(now=START, members=tuple(found)))
        assert not [gap for one in plans for gap in src.find_changed_objects(one)]
        assert (broker.asked, broker.identified) == (
            asked + 1,
            identified + 2,
        ), "for the plan; by its id also behind the move"
        state, resume = decision.after, {str(one.member): one.resume for one in plans}
        took.append({int(one.member.partition): one.end - one.start for one in plans})
    assert [each[0] for each in took] == [5, 5, 2, 0, 0]
    assert [each[ahead] for each in took] == [5, 0, 0, 5, 2]
    known = state["sources"]["web"]["inputs"]
    assert {name: one["frontier"] for name, one in known.items()} == {
        f"web/{p}": t[-1] - SECOND for p, t in times.items()
    }
    assert decision.frontier_after == START - SECOND
    assert decision.holder is not None
    assert decision.holder["member"] == f"web/{quiet}"
