"""Presets: the defaults of six systems that users may know (docs/semantics.md, section 8).

A preset only sets defaults. What the pipeline's own YAML says wins, field by field.
"""

from __future__ import annotations

from typing import Any, Final

# By default these systems treat no member as idle.
_NEVER_IDLE: Final = {"idle_timeout": "never"}

# Only what differs from the defaults of the models, so that a new option has one default for all
# presets unless a preset names it.
PRESETS: Final[dict[str, dict[str, Any]]] = {
    "tidegate": {},
    "nscldaq": {
        "source": {"lag": "0", "frontier": "inclusive", "coalesce": _NEVER_IDLE},
        "coalesce": {**_NEVER_IDLE, "members": "discovered"},
        "release": {
            "mode": "ordered",
            "build_window": "20s",
            "startup_grace": "2s",
            "on_late": "emit_flagged",
        },
        "barriers": {"identity": "ordinal"},
    },
    "streaminsight": {
        "source": {
            "punctuation": {"explicit": True, "regress": "raise", "on_violation": "error"},
            "coalesce": _NEVER_IDLE,
        },
        "declared": {
            "punctuation": {"regress": "raise", "on_violation": "drop"},
            "coalesce": _NEVER_IDLE,
        },
        "declared_release": {"mode": "commit", "on_late": "drop"},
        "coalesce": _NEVER_IDLE,
        "release": {"mode": "commit", "on_late": "error"},
    },
    "hazelcast": {
        "punctuated": {"regress": "error"},
        "source": {
            "frame": "1s",
            "coalesce": {"revived": "freeze", "joins": "hold", "all_done": "hold"},
        },
        "coalesce": {
            "idle_timeout": "60s",
            "all_idle": "jump",
            "all_done": "hold",
            "revived": "freeze",
            "joins": "hold",
        },
        "release": {"mode": "pass_through"},
        "window": {"late_unit": "first_window"},
        "session": {
            "session_touch": "separate",
            "session_late": "event",
            "session_close": "at_end",
        },
    },
    "flink": {
        "source": {
            "frontier": "inclusive",
            "coalesce": {**_NEVER_IDLE, "on_idle_punctuation": "ignore"},
        },
        "coalesce": {
            **_NEVER_IDLE,
            "all_idle": "jump",
            "revived": "ignore",
            "on_idle_punctuation": "ignore",
        },
        "release": {"mode": "pass_through"},
        "barriers": {"identity": "id", "overtake": "subsume"},
        "session": {"session_touch": "merge", "session_late": "merged", "session_close": "at_end"},
    },
    "pipet": {
        "undeclared": {"lag": "0"},
        "release": {"mode": "ordered", "on_late": "reject_to_origin"},
    },
    "wire": {
        "source": {"lag": "5s", "coalesce": {"all_idle": "hold", "revived": "freeze"}},
        "coalesce": {"idle_timeout": "60s", "all_idle": "hold", "revived": "freeze"},
        "release": {"mode": "pass_through"},
        "barriers": {"identity": "id", "timeout": "10m", "on_timeout": "abort"},
        "window": {"late_unit": "window"},
        "session": {"session_touch": "merge", "session_close": "at_end"},
    },
}
"""Preset and its defaults for sources, coalescing, release, barriers, windows and sessions.

``punctuated`` adds to the punctuation of sources that have one. Sources with declared settings
(generated punctuation or a lag) take ``declared`` instead of ``source``, and a pipeline with such a
source ``declared_release`` instead of ``release``. ``undeclared`` adds to sources that say nothing
about their frontier.
"""


def apply_preset(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the raw spec with its preset's defaults in the fields that the spec leaves out.

    The argument is not changed. It is returned itself if its preset has no defaults, is unknown or
    is not a text.
    """
    name = raw.get("preset", "tidegate")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if not preset:
        return raw
    sources = dict(_list_mapping_items(raw.get("sources")))
    # In StreamInsight the two ways to advance time have different policies for late events, and the
    # release belongs to the whole pipeline.
    if any(_has_declared_frontier(source) for source in sources.values()):
        preset = {**preset, "release": preset.get("declared_release", preset.get("release", {}))}
    merged = dict(raw)
    for section in ("coalesce", "release", "barriers"):
        if section in preset:
            merged[section] = _merge_defaults(preset[section], raw.get(section, {}))
    # An empty or misspelt section stays as it is: the models report it with its line.
    merged["sources"] = {
        name: _apply_to_source(preset, source) for name, source in sources.items()
    } or raw.get("sources", {})
    windows = {
        name: _apply_to_window(preset, window)
        for name, window in _list_mapping_items(raw.get("windows"))
    }
    if windows:
        merged["windows"] = windows
    return merged


def _has_declared_frontier(source: Any) -> bool:
    """Whether a source's frontier follows from settings, not from punctuation rows of its own."""
    if not isinstance(source, dict):
        return False
    punctuation = source.get("punctuation")
    generated = isinstance(punctuation, dict) and any(
        punctuation.get(k) is not None for k in ("every_events", "every_span")
    )
    return generated or source.get("lag") is not None


def _apply_to_source(preset: dict[str, Any], source: Any) -> Any:
    if not isinstance(source, dict):
        return source
    defaults = dict(preset.get("source", {}))
    if _has_declared_frontier(source):
        defaults = dict(preset.get("declared", defaults))
    has_punctuation = isinstance(source.get("punctuation"), dict)
    # Only sources that have a punctuation get its defaults: alone they would switch it on.
    if has_punctuation and "punctuated" in preset:
        defaults["punctuation"] = preset["punctuated"]
    if not has_punctuation and _has_declared_frontier(source):
        defaults.pop("punctuation", None)  # a lag needs no punctuation
    if all(source.get(name) is None for name in ("lag", "punctuation", "wall_clock")):
        defaults |= preset.get("undeclared", {})
    return _merge_defaults(defaults, source)


def _apply_to_window(preset: dict[str, Any], window: Any) -> Any:
    if not isinstance(window, dict):
        return window
    defaults = dict(preset.get("window", {}))
    if window.get("kind") == "session":
        defaults |= preset.get("session", {})
    return _merge_defaults(defaults, window)


def _list_mapping_items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _merge_defaults(defaults: Any, own: Any) -> Any:
    """Own values win; nested sections merge field by field."""
    # Lists are replaced as a whole: adding to a default list could not be undone in YAML.
    if not isinstance(defaults, dict) or not isinstance(own, dict):
        return own
    return {**defaults, **{k: _merge_defaults(defaults.get(k), v) for k, v in own.items()}}
