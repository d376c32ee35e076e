"""What the cases of each suite may say, and what an adapter does with the rest.

A case that says something its adapter does not know is skipped and names it: leaving it out
silently would compare something else. A case that lacks what it needs, or has a word where a number
belongs, is malformed and fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tidegate.time_units import TICK_MAX, TICK_MIN

_ALWAYS: Final = {"id", "note", "why", "how", "since", "same_as_tests", "unit", "op"}
"""Words for readers, in every case and step."""
_WHOLE: Final = {
    *(
        "ts",
        "n",
        "ms",
        "now_ms",
        "gap",
        "size",
        "slide",
        "offset",
        "size_s",
        "slide_s",
        "gap_s",
        "inputs",
        "channels",
    ),
    *(
        "channel",
        "partition",
        "partitions",
        "queue",
        "bound",
        "timeout",
        "grace",
        "interval",
        "watermark_delay",
    ),
    *(
        "watermark_delay_s",
        "frame",
        "idle_timeout",
        "lag",
        "constant_watermark",
        "allowed_lateness",
        "total",
    ),
}
_WORDS: Final = {"MAX", "MIN", "infinite"}
"""What may be given instead of a number."""


class UnknownFeatureError(Exception):
    """The case uses something the adapter does not know; the message names it."""


class MalformedCaseError(Exception):
    """The case is not written as its suite's cases are; the message says where."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Names that an object must have, and names that it may have."""

    needs: frozenset[str]
    may: frozenset[str] = frozenset()

    @classmethod
    def of(cls, needs: str = "", may: str = "") -> Fields:
        """From words."""
        return cls(frozenset(needs.split()), frozenset(may.split()))

    def check(self, where: str, given: Any) -> None:
        """See that an object has what it needs, and nothing that is not known."""
        if not isinstance(given, Mapping):
            raise MalformedCaseError(f"{where} is no object: {given!r}")
        missing = sorted(self.needs - given.keys())
        if missing:
            raise MalformedCaseError(f"{where} has no {missing[0]!r}")
        strange = sorted(given.keys() - self.needs - self.may - _ALWAYS)
        if strange:
            raise UnknownFeatureError(f"{where}: the adapter does not know {strange[0]!r}")
        for name in sorted(given.keys() & _WHOLE):
            _check_number(f"{where}: {name!r}", given[name])


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words of one suite.

    Attributes:
        shapes: the kinds of cases it has; a case is of the first whose needs it meets.
        steps: operation -> fields of such a step.
        windows: kind of window -> fields of such a window.
        choices: field of a case -> the values that are known.
        trigger: fields of a trigger, where it is an object.
        events: fields of an entry of a case's `events`, where they are objects.
        uncompared: names that say something tidegate has no figure for: read, and named in the
            result.
    """

    shapes: tuple[Fields, ...]
    steps: Mapping[str, Fields] = field(default_factory=dict)
    windows: Mapping[str, Fields] = field(default_factory=dict)
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    trigger: Fields | None = None
    events: Fields | None = None
    uncompared: frozenset[str] = frozenset()

    def check(self, case: Mapping[str, Any]) -> list[str]:
        """See that an adapter knows everything a case says; returns what of it is not compared.

        Raises:
            UnknownFeatureError: it does not.
            MalformedCaseError: something is missing, or of the wrong type.
        """
        shape = next((s for s in self.shapes if s.needs <= case.keys()), self.shapes[0])
        shape.check("the case", case)
        self._check_window(case.get("window"), given="window" in case)
        if self.trigger is not None and "trigger" in case:
            self.trigger.check("the trigger", case["trigger"])
        for name, known in self.choices.items():
            if name in case and case[name] not in known:
                raise UnknownFeatureError(f"the adapter does not know {name} {case[name]!r}")
        if self.events is not None:
            for number, event in enumerate(_list(case, "events")):
                self.events.check(f"event {number}", event)
        for number, step in enumerate(_list(case, "steps")):
            self._check_step(number, step)
        said = [
            case,
            *_list(case, "steps"),
            *(r for s in _list(case, "steps") for r in _list(s, "rows") if isinstance(r, Mapping)),
        ]
        return sorted(self.uncompared & {name for one in said for name in one})

    def _check_window(self, window: Any, *, given: bool) -> None:
        if not given or not self.windows:
            return
        if not isinstance(window, Mapping) or "kind" not in window:
            raise MalformedCaseError(f"the window is no object with a 'kind': {window!r}")
        if window["kind"] not in self.windows:
            raise UnknownFeatureError(
                f"the adapter does not know windows of kind {window['kind']!r}"
            )
        self.windows[window["kind"]].check(f"the {window['kind']} window", window)

    def _check_step(self, number: int, step: Any) -> None:
        if not isinstance(step, Mapping) or not isinstance(step.get("op"), str):
            raise MalformedCaseError(f"step {number} is no object with an 'op': {step!r}")
        if step["op"] not in self.steps:
            raise UnknownFeatureError(f"step {number}: the adapter does not know {step['op']!r}")
        self.steps[step["op"]].check(f"step {number} ({step['op']})", step)


def _list(case: Mapping[str, Any], name: str) -> list[Any]:
    found = case.get(name, [])
    if not isinstance(found, list):
        raise MalformedCaseError(f"{name!r} is no list")
    return found


def _check_number(where: str, value: Any) -> None:
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str) and one in _WORDS:
            continue
        if isinstance(one, bool) or not isinstance(one, int):
            raise MalformedCaseError(f"{where} is {one!r}, a whole number is expected")
        if not TICK_MIN <= one <= TICK_MAX:
            raise UnknownFeatureError(f"{where} is {one}: times are 64-bit ticks")


_of: Final = Fields.of
_NOTHING: Final = Fields.of()
_ROWS: Final = Fields.of("rows")
_SIGNAL: Final = Fields.of("input", "returns error")
_SHAPES: Final = {
    "tumbling": _of("kind size", "offset slide"),
    "sliding": _of("kind size slide", "offset"),
    "session": _of("kind gap", "offset"),
}
_WINDOW_STEPS: Final = {
    "event": _of("key value ts", "gap"),
    "watermark": _of("ts"),
    "end_of_input": _NOTHING,
    "checkpoint_and_restore": _NOTHING,
    "expect": _ROWS,
    "expect_late": _ROWS,
    "end_expect_nothing_more": _NOTHING,
}
_WINDOWS: Final = Vocabulary(
    shapes=(
        _of(
            "window trigger aggregate allowed_lateness watermark_means steps",
            "late_side_output touching_sessions evictor",
        ),
    ),
    steps=_WINDOW_STEPS,
    windows={
        **_SHAPES,
        "session": Fields(
            frozenset({"kind"}), frozenset({"gap", "gap_by_element", "point_values"})
        ),
        "global": _of("kind"),
    },
    choices={
        "aggregate": ("sum", "count", "min", "max", "avg"),
        "watermark_means": ("le", "lt"),
        "touching_sessions": ("merge", "separate"),
    },
    trigger=_of("on", "panes n interval"),
)

KNOWN: Final[Mapping[str, Vocabulary]] = {
    "flink_window_operator": _WINDOWS,
    "hazelcast_window": _WINDOWS,
    "flink_window_assignment": Vocabulary(
        shapes=(_of("window ts windows"), _of("windows merged"), _of("add live"), _of("kind args")),
        windows=_SHAPES,
        choices={"kind": ("tumbling", "sliding", "session")},
    ),
    "beam": Vocabulary(
        shapes=(
            _of(
                "window trigger panes allowed_lateness steps",
                "output_ts_rule must_be_rejected aggregate closing expect_is_ordered_total",
            ),
            _of(
                "window trigger panes allowed_lateness data bundle_sizes late_data"
                " expect_panes_per_window then_watermark",
                "output_ts_rule",
            ),
        ),
        steps={
            "events": _of("ts", "values"),
            "watermark": _of("ts", "error"),
            "expect": _ROWS,
            "expect_window_empty": _of("window"),
            "expect_dropped_closed": _of("total"),
            "expect_final_pane": _of("window values"),
            "expect_panes": _of("window", "on_time final non_late all"),
            "expect_state": _of("", "present absent tombstone"),
        },
        windows={
            kind: Fields(shape.needs, shape.may | {"timestamp_transform"})
            for kind, shape in _SHAPES.items()
        },
        choices={
            "panes": ("accumulating", "discarding"),
            "then_watermark": ("MAX",),
            "aggregate": ("sum of values",),
            "closing": ("fire_always", "fire_if_non_empty"),
        },
        uncompared=frozenset({"index", "nonspeculative_index", "expect_is_ordered_total"}),
    ),
    "kafka_streams": Vocabulary(
        shapes=(
            _of(
                "window grace aggregate events",
                "updates final dropped dropped_window_assignments sessions lateness_max"
                " lateness_mean",
            ),
            _of("steps", "partitions max_idle_ms"),
        ),
        steps={
            "add": _of("partition ts"),
            "expect": _of("", "buffered stream_time"),
            "next": _of("partition ts", "stream_time lateness"),
            "ready": _of("", "now_ms ready"),
        },
        windows=_SHAPES,
        events=_of("key ts", "value"),
        uncompared=frozenset({"lateness_max", "lateness_mean"}),
    ),
    "spark_watermark": Vocabulary(
        shapes=(
            _of(
                "steps",
                "window watermark_delay mode columns policy touching_sessions must_be_rejected"
                " outer_window",
            ),
        ),
        steps={
            "batch": _of("", "ts events"),
            "batches": _of("first second", "then_watermark"),
            "expect_new": _of("rows", "if_no_data_batches"),
            "expect_all_since_clear": _ROWS,
            "expect_watermark": _of("value"),
            "expect_metrics": _of(
                "", "dropped_by_watermark dropped_by_watermark_groups state_rows"
            ),
            "expect_event_time": _of("", "avg max min watermark_before_batch"),
            "restart": _NOTHING,
            "note": _of("", "text"),
        },
        windows=_SHAPES,
        choices={
            "mode": ("append", "update", "complete"),
            "policy": ("min", "max"),
            "touching_sessions": ("merge", "separate"),
        },
        uncompared=frozenset({"state_rows", "dropped_by_watermark_groups", "avg", "max", "min"}),
    ),
    "risingwave_eowc": Vocabulary(
        shapes=(_of("steps", "window watermark_delay_s aggregate emit"),),
        steps={"insert": _ROWS, "expect_total": _of("rows", "columns")},
        windows={
            "tumbling": _of("kind size_s", "slide_s"),
            "sliding": _of("kind size_s slide_s"),
            "session": _of("kind gap_s"),
        },
    ),
    "arroyo": Vocabulary(
        shapes=(_of("input window aggregate columns rows", "watermark key"),),
        windows=_SHAPES,
        choices={"input": ("cars", "impulse")},
    ),
    "nexmark_small": Vocabulary(shapes=(_of("rows", "query"),)),
    "flink_valve": Vocabulary(
        shapes=(_of("inputs steps"),),
        steps={
            "watermark": _of("input ts"),
            "idle": _of("input"),
            "active": _of("input"),
            "expect": _of("out"),
            "expect_input_state": _of("input", "watermark aligned"),
        },
    ),
    "hazelcast_coalescer": Vocabulary(
        shapes=(_of("inputs steps"),),
        steps={
            "watermark": _of("input ts", "returns error"),
            "idle": _SIGNAL,
            "event": _SIGNAL,
            "done": _SIGNAL,
            "poll": _of("", "returns"),
            "expect_state": _of("top_observed coalesced"),
        },
    ),
    "flink_source_multiplexer": Vocabulary(
        shapes=(_of("steps"),),
        steps={
            "register": _of("output"),
            "unregister": _of("output", "returns"),
            "watermark": _of("output ts mode"),
            "idle": _of("output mode"),
            "active": _of("output mode"),
            "periodic": _NOTHING,
            "expect": _of("", "watermark idle reports"),
        },
    ),
    "hazelcast_source_watermark": Vocabulary(
        shapes=(_of("config steps"), _of("config events out")),
        steps={
            "tick": _of("now_ms out"),
            "event": _of("now_ms partition ts out"),
            "add_partitions": _of("n"),
            "remove_partition": _of("now_ms partition out"),
            "restore_watermark": _of("partition ts"),
        },
    ),
    "flink_watermark_generator": Vocabulary(
        shapes=(_of("bound events watermark", "probe_twice"), _of("timeout", "steps error")),
        steps={"advance": _of("ms"), "activity": _NOTHING, "check": _of("", "idle")},
    ),
    "flink_barrier_alignment": Vocabulary(
        shapes=(_of("channels steps final", "checkpoints_after_a_channel_ended"),),
        steps={
            "data": _of("channel", "after"),
            "end": _of("channel", "after"),
            "barrier": _of("channel id", "after"),
            "cancel": _of("channel id", "after"),
        },
    ),
    "hazelcast_barrier_merge": Vocabulary(
        shapes=(_of("inputs steps guarantee"), _of("inputs steps ordered")),
        steps={"add": _of("queue items"), "drain": _of("", "out state error")},
        choices={"guarantee": ("none", "at_least_once", "exactly_once"), "ordered": (True, False)},
        uncompared=frozenset({"state"}),
    ),
}
"""Suite (the file's stem) -> its words."""
