"""What random worlds found once, shrunk and kept by name: model and decider must agree, and on this outcome."""

from __future__ import annotations

from typing import Any

from tests.reference.support import COLUMNS, Pair, Tick, World
from tidegate.jobs.eventtime.types import Member
from tidegate.jobs.spec.pipeline import PipelineSpec

A, B, C = Member("a"), Member("b"), Member("c")
NEVER = {"idle_timeout": "never"}


def played(members: list[Member], ticks: list[Tick], **more: Any) -> Pair:
    """A world of lag-0 sources that never idle, unless `more` says so."""
    source = {
        "path": "x",
        "schema": COLUMNS,
        "event_time": "t",
        "end_time": "until",
        "lag": 0,
        "coalesce": NEVER,
        "barriers": {"kind": "kind", "types": ["begin"], "id": "id"},
    }
    raw = {"name": "p", "sources": {m.source: source for m in members}, "coalesce": NEVER, **more}
    return Pair(World(PipelineSpec.model_validate(raw), tuple(members), tuple(ticks))).play()


def rows(*times: int) -> list[dict[str, Any]]:
    """Point rows."""
    return [{"t": time, "k": "x", "v": 0} for time in times]


def barriers(count: int) -> list[dict[str, Any]]:
    """Barrier rows."""
    return [{"t": 0, "kind": "begin", "id": number + 1} for number in range(count)]


def test_a_row_equal_to_an_expired_one_leaves_at_once() -> None:
    """The release mark never goes back: what ties with a row that left by its residence is not held again."""
    ticks = [Tick(0, {A: rows(7)}, None), Tick(5, {}, None), Tick(0, {B: rows(7)}, None)]
    pair = played([A, B, C], ticks, release={"build_window": 5})
    assert [[row.time for _, row, _ in o.released] for o in pair.outcomes] == [[], [7], [7]]


def test_rows_read_together_expire_together() -> None:
    """No residence runs out for the newest row of an epoch while a member it waits for has rows left."""
    ticks = [Tick(0, {A: rows(0), B: [*rows(1), *barriers(1)]}, 1), Tick(0, {}, None)]
    pair = played([A, B, C], ticks, release={"build_window": 0})
    assert [len(o.released) for o in pair.outcomes] == [0, 2]


def test_the_build_window_is_nothing_to_rows_that_pass_through() -> None:
    """Without an order buffer no residence can run out, and F does not move by it."""
    pair = played([A, B], [Tick(0, {B: rows(0)}, None)], release={"mode": "pass_through", "build_window": 0})
    assert pair.outcomes[0].after == -(2**63)


def test_data_flows_behind_one_open_barrier_but_not_behind_two() -> None:
    """Alignment `pass`: a member at two open barriers is not read any further."""
    ticks = [Tick(0, {A: barriers(4)}, None), Tick(0, {}, None), Tick(0, {}, None)]
    pair = played([A, B], ticks, barriers={"alignment": "pass"})
    assert [o.consumed["a/0"] for o in pair.outcomes] == [1, 1, 0]


def test_the_last_rows_of_a_member_count_before_its_end() -> None:
    """A member that ends with its last row moves F by that row, also where the end itself holds F."""
    pair = played([A], [Tick(0, {A: rows(8)}, None, frozenset({A}))], coalesce={**NEVER, "all_done": "hold"})
    assert pair.outcomes[0].after == 8


def test_members_of_a_quiet_source_are_idle() -> None:
    """The output's timer makes a source of one partition idle, and its member is shown so."""
    ticks = [Tick(0, {}, None, frozenset({A})), Tick(4, {}, None)]
    pair = played([A, B], ticks, coalesce={"idle_timeout": 4})
    assert pair.outcomes[-1].statuses == {"a/0": "done", "b/0": "idle"}
