"""Every preset sets what semantics.md section 8 says."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.jobs.spec.event_time_options import LatePolicy, ReleaseMode
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import WindowSpec

SECOND = 1_000_000


def spec(preset: str, source: dict[str, Any] | None = None, **sections: Any) -> PipelineSpec:
    """A pipeline with one source and both kinds of windows."""
    base = {"path": "a", "schema": {"t": "timestamp"}, "event_time": "t", **(source or {})}
    aggregates = {"n": "count(*)"}
    windows = {
        "fixed": {"kind": "tumbling", "size": "10s", "aggregates": aggregates},
        "visit": {"kind": "session", "gap": "10s", "aggregates": aggregates},
    }
    return PipelineSpec.model_validate(
        {"name": "p", "preset": preset, "sources": {"a": base}, "windows": windows, **sections}
    )


def sessions(window: WindowSpec) -> tuple[str, str, bool]:
    """Touch, lateness and close of a session window."""
    return window.session_touch, window.session_late, window.closes_after_end


def test_nscldaq() -> None:
    """Ordered by a build window of 20 s after a grace of 2 s.

    Sources discovered, never idle; late rows flagged.
    """
    found = spec("nscldaq")
    source, release = found.sources["a"], found.release
    assert (source.lag, source.frontier, source.coalesce.idle_timeout) == (0, "inclusive", None)
    assert (found.coalesce.idle_timeout, found.coalesce.members) == (None, "discovered")
    assert (release.mode, release.on_late) == (ReleaseMode.ORDERED, LatePolicy.EMIT_FLAGGED)
    assert (release.build_window, release.startup_grace) == (20 * SECOND, 2 * SECOND)
    assert (found.barriers.identity, found.barrier_timeout) == ("ordinal", 80 * SECOND)


def test_streaminsight_with_explicit_punctuation() -> None:
    """Rows are committed.

    A violating row is an error; a regressing punctuation is raised; no one falls idle.
    """
    found = spec("streaminsight")
    punctuation = found.sources["a"].punctuation
    assert punctuation is not None
    assert (punctuation.explicit, punctuation.regress, punctuation.on_violation) == (
        True,
        "raise",
        "error",
    )
    assert (found.release.mode, found.release.on_late) == (ReleaseMode.COMMIT, LatePolicy.ERROR)
    assert (found.coalesce.idle_timeout, found.sources["a"].coalesce.idle_timeout) == (None, None)


def test_streaminsight_with_declared_settings() -> None:
    """Generated punctuation: violating rows are dropped, or adjusted if the spec says so."""
    found = spec("streaminsight", {"punctuation": {"every_events": 1}})
    punctuation = found.sources["a"].punctuation
    assert punctuation is not None
    assert (punctuation.explicit, punctuation.regress, punctuation.on_violation) == (
        False,
        "raise",
        "drop",
    )
    assert found.release.on_late is LatePolicy.DROP
    adjusting = spec(
        "streaminsight",
        {"punctuation": {"every_events": 1, "on_violation": "adjust"}},
        release={"on_late": "adjust"},
    )
    assert adjusting.sources["a"].punctuation is not None
    assert adjusting.sources["a"].punctuation.on_violation == "adjust"
    assert adjusting.release.on_late is LatePolicy.ADJUST


def test_hazelcast() -> None:
    """A lag is required.

    F jumps when all are idle, holds at the end, freezes for the revived; frame 1 s.
    """
    with pytest.raises(ValueError, match="lag"):
        spec("hazelcast")
    found = spec("hazelcast", {"lag": "3s"})
    for level in (found.coalesce, found.sources["a"].coalesce):
        assert (level.idle_timeout, level.all_idle, level.all_done) == (60 * SECOND, "jump", "hold")
        assert (level.revived, level.joins) == ("freeze", "hold")
    assert (found.release.mode, found.sources["a"].frame) == (ReleaseMode.PASS_THROUGH, SECOND)
    assert found.windows["fixed"].late_unit == "first_window"
    assert sessions(found.windows["visit"]) == ("separate", "event", False)
    punctuated = spec("hazelcast", {"punctuation": {"explicit": True}}).sources["a"].punctuation
    assert punctuated is not None
    assert punctuated.regress == "error"


def test_flink() -> None:
    """Inclusive, never idle by itself.

    Idle punctuation ignored; barriers by id that subsume older ones.
    """
    found = spec("flink", {"lag": "3s"})
    for level in (found.coalesce, found.sources["a"].coalesce):
        assert (level.idle_timeout, level.all_idle, level.revived) == (None, "jump", "ignore")
        assert level.on_idle_punctuation == "ignore"
    assert (found.release.mode, found.sources["a"].frontier) == (
        ReleaseMode.PASS_THROUGH,
        "inclusive",
    )
    assert (found.barriers.identity, found.barriers.overtake) == ("id", "subsume")
    assert sessions(found.windows["visit"]) == ("merge", "merged", False)


def test_pipet() -> None:
    """Late rows are rejected to their origin; without a lag a row below the newest one is late."""
    found = spec("pipet")
    assert (found.release.on_late, found.sources["a"].lag) == (LatePolicy.REJECT_TO_ORIGIN, 0)
    assert spec("pipet", {"lag": "3s"}).sources["a"].lag == 3 * SECOND
    assert spec("pipet", {"punctuation": {"explicit": True}}).sources["a"].lag is None


def test_wire() -> None:
    """Lag 5 s, idle after 60 s.

    F holds when all are idle; barriers by id abort after ten minutes.
    """
    found = spec("wire")
    assert found.sources["a"].lag == 5 * SECOND
    for level in (found.coalesce, found.sources["a"].coalesce):
        assert (level.idle_timeout, level.all_idle, level.revived) == (
            60 * SECOND,
            "hold",
            "freeze",
        )
    assert found.release.mode is ReleaseMode.PASS_THROUGH
    assert (found.barriers.identity, found.barrier_timeout, found.barriers.on_timeout) == (
        "id",
        600 * SECOND,
        "abort",
    )
    assert found.windows["fixed"].late_unit == "window"
    assert sessions(found.windows["visit"]) == ("merge", "merged", False)


@pytest.mark.parametrize(
    "preset", ["nscldaq", "streaminsight", "hazelcast", "flink", "pipet", "wire"]
)
def test_a_spec_reads_back_as_itself(preset: str) -> None:
    """Applying a preset to a spec that already has it changes nothing: its digest stays."""
    found = spec(preset, {"lag": "3s"})
    again = PipelineSpec.model_validate_json(found.canonical_json())
    assert again == found
    assert again.digest() == found.digest()


def test_a_frame_of_never_emits_none() -> None:
    """``never`` is a frame, ``off`` is none."""
    assert spec("hazelcast", {"lag": "3s", "frame": "never"}).sources["a"].frame == 0
    assert spec("hazelcast", {"lag": "3s", "frame": "off"}).sources["a"].frame is None
