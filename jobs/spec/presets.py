"""Presets: the defaults of six systems that users may know (docs/semantics.md, section 8).

A preset only sets defaults. What the pipeline's own YAML says wins, field by field.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any, Final

# TOML, because every command reads this and the standard library parses it.
PRESETS: Final[dict[str, dict[str, Any]]] = tomllib.loads(
    files(__package__).joinpath("presets.toml").read_text("utf-8")
)
"""Preset and its defaults for sources, coalescing, release, barriers, windows and sessions."""


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
