"""Writes the reference pages that follow from the code: options, errors, alerts and output.

`python docs/generate.py` writes the pages; with ``--check`` it only says which are out of date.
"""

from __future__ import annotations

import html
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tidegate.checkpoints.incidents import INCIDENT_KINDS
from tidegate.errors import ErrorDefinition
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import format_duration

_PAGES = Path(__file__).parent
_ROOMS = (
    "checkpoints",
    "expectations",
    "infra",
    "operators",
    *(
        f"jobs.{room}"
        for room in (
            "spec",
            "eventtime",
            "advise",
            "engine",
            "sources",
            "spark",
            "sinks",
            "streams",
            "splice",
            "driver",
            "sealed_queries",
            "cases",
        )
    ),
    "jobs.cli",
)
_OPTIONS_HEAD = """# Every option of a pipeline

One section per part of the YAML file, in the order of the file. `<name>` is a name that you choose.
A field without a default is required. A duration is text with a unit, such as `10s` or `1h30m`.
`tidegate schema` prints the same as JSON Schema, for editors.

This page is generated from the models by `make docs`.
"""
_ERRORS_HEAD = """# Every error code

An error has a stable code. Its class decides the exit code of a command and what the driver and
Airflow do: they try a *transient* error again; a *fenced* driver stops because another one took
over; *poison* and *configuration* need a person. Words in braces are filled in when it happens.

| class | exit code |
|---|---|
| poison | 1 |
| configuration | 2 |
| transient | 3 |
| fenced | 4 |

This page is generated from the catalogues (`errors.toml` of each folder) by `make docs`.
"""

_ALERT_VARIABLE = re.compile(r"\{\{ \$(?:labels\.)?(\w+)[^}]*\}\}")
_ERROR_COLUMNS = """| code | class | what happened | what was kept | what to do | folder |
|---|---|---|---|---|---|"""

_ALERTS_HEAD = """# Every alert

Everything that is announced by itself, and where that is decided:

- **tidegate**: the driver each minute, and Airflow's sweep, find incidents in the bucket
  (`checkpoints/incidents.py`). They send them to the receivers in `supervision.alerts`
  ([how](how-to/alerts-to-slack.md)). Off by default: a pipeline without receivers sends nothing.
- **Prometheus**: the rules in `infra/deploy/alerts.yaml`, from the
  [metrics of drivers and landings](observability.md#metrics-of-drivers). All are on once Prometheus
  loads the file, as the one of `infra/deploy/compose` does. To send them to people, run an
  Alertmanager, and name it under `alerting.alertmanagers` in Prometheus' configuration. The one of
  `infra/deploy/compose` names none.
- Tasks that fail are reported by [Airflow's notifiers](airflow.md#notifications).

An alert is sent when its condition has held for the time in the fourth column. Words in braces are
filled in.

This page is generated from the kinds of incidents and the rules by `make docs`.

| alert | decided by | severity | after | what it says | what to do | guarantee |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class _Section:
    """One model of the spec and the places in the YAML file where it occurs."""

    name: str
    schema: dict[str, Any]
    paths: list[str]


def _list_references(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path suffix, model name) for each model that a field's schema refers to."""
    if "$ref" in schema:
        yield "", schema["$ref"].rpartition("/")[2]
    for part in [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
        yield from _list_references(part)
    if isinstance(schema.get("additionalProperties"), dict):
        for suffix, name in _list_references(schema["additionalProperties"]):
            yield f".<name>{suffix}", name
    if isinstance(schema.get("items"), dict):
        for suffix, name in _list_references(schema["items"]):
            yield f"[]{suffix}", name


def _collect_sections() -> list[_Section]:
    """Return the models in the order in which the YAML file meets them."""
    root = PipelineSpec.model_json_schema(by_alias=True)
    models = root["$defs"]
    sections = {"PipelineSpec": _Section("PipelineSpec", root, [""])}
    waiting = ["PipelineSpec"]
    while waiting:
        current = sections[waiting.pop(0)]
        for field, schema in current.schema.get("properties", {}).items():
            for suffix, name in _list_references(schema):
                if "properties" not in models[name]:
                    continue
                path = f"{current.paths[0]}.{field}{suffix}".lstrip(".")
                if name in sections:
                    sections[name].paths.append(path)
                else:
                    sections[name] = _Section(name, models[name], [path])
                    waiting.append(name)
    return list(sections.values())


def _describe_type(schema: dict[str, Any], models: dict[str, Any]) -> str:
    """Return a field's type in words; choices are listed."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        target = models[name]
        return (
            f"[{name}](#{name.lower()})"
            if "properties" in target
            else _describe_type(target, models)
        )
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{json.dumps(choice).strip(chr(34))}`" for choice in choices)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = [
                _describe_type(part, models) for part in schema[key] if part.get("type") != "null"
            ]
            return " or ".join(dict.fromkeys(kinds))
    if str(schema.get("description", "")).startswith("a duration"):
        return "duration"
    if schema.get("type") == "array":
        return f"list of {_describe_type(schema.get('items', {}), models)}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return (
            f"name to {_describe_type(values, models)}" if isinstance(values, dict) else "mapping"
        )
    return {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
    }.get(str(schema.get("type")), "any value")


@cache
def _load_examples() -> dict[str, dict[str, Any]]:
    """Return the examples of docs/option_examples.yaml: model name, field, value."""
    path = _PAGES / "option_examples.yaml"
    examples: dict[str, dict[str, Any]] = YAML(typ="safe", pure=True).load(path)
    return examples


def _find_example(schema: dict[str, Any], models: dict[str, Any]) -> Any:
    """Return an example that follows from the type: its own, or a choice but the default."""
    if "$ref" in schema:
        return _find_example(models[schema["$ref"].rpartition("/")[2]], models)
    if schema.get("examples"):
        return schema["examples"][0]
    if "enum" in schema:
        return next((c for c in schema["enum"] if c != schema.get("default")), schema["enum"][0])
    if "const" in schema:
        return schema["const"]
    for part in [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
        if part.get("type") != "null":
            return _find_example({**part, "default": schema.get("default")}, models)
    if schema.get("type") == "boolean":
        return not schema.get("default", False)
    return schema.get("default")


def _format_value(value: Any) -> str:
    if value is None or value in ("", {}, []):
        return ""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"`{text}`".replace("|", "\\|")


def _format_default(schema: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    default = schema.get("default")
    if isinstance(default, dict) and default:
        return "its defaults"
    return _format_value(default) or "none"


def _join_lines(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def render_options() -> str:
    """Return the text of docs/options.md."""
    sections = _collect_sections()
    models = {section.name: section.schema for section in sections}
    models |= sections[0].schema["$defs"]
    parts = [_OPTIONS_HEAD]
    for section in sections:
        places = ", ".join(f"`{path}`" for path in section.paths if path) or "the file itself"
        meaning = _join_lines(section.schema.get("description", ""))
        parts.append(f"## {section.name}\n\n{meaning}\n\nWhere: {places}\n")
        parts.append("\n".join(_render_fields(section, models)) + "\n")
    return "\n".join(parts)


def _render_fields(section: _Section, models: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of a model's fields."""
    yield "| field | type | default | meaning | example |"
    yield "|---|---|---|---|---|"
    examples = _load_examples().get(section.name, {})
    for field, schema in section.schema.get("properties", {}).items():
        kind, ticks = _describe_type(schema, models), schema.get("default")
        # Of all texts, only durations have a number as their default.
        if kind in ("text", "duration") and isinstance(ticks, int):
            kind = "duration"
            written = {"default": format_duration(ticks), "examples": [format_duration(2 * ticks)]}
            schema = {**schema, **written}
        cells = (
            f"`{field}`",
            kind,
            _format_default(schema, field in section.schema.get("required", [])),
            _join_lines(schema.get("description", "")),
            _format_value(examples.get(field, _find_example(schema, models))),
        )
        yield "| " + " | ".join(cells) + " |"


def list_catalogue() -> list[tuple[str, ErrorDefinition]]:
    """Return (folder, definition) for every entry of every catalogue, sorted by code."""
    return sorted(_read_catalogues(), key=lambda row: (row[1].code, row[0], row[1].message))


def _read_catalogues() -> Iterator[tuple[str, ErrorDefinition]]:
    for room in _ROOMS:
        folder = room.replace(".", "/")
        texts = _PAGES.parent / folder / "errors.toml"
        if texts.exists():
            module = importlib.import_module(f"tidegate.{room}.errors")
            for name in tomllib.loads(texts.read_text("utf-8")):
                yield folder, getattr(module, name)


def render_errors() -> str:
    """Return the text of docs/errors.md."""
    groups: dict[str, list[str]] = {}
    for folder, entry in list_catalogue():
        cells = (
            f'<a id="{entry.code}"></a>`{entry.code}`',
            entry.error.failure_class.value,
            _join_lines(entry.message),
            _join_lines(entry.kept or ""),
            _join_lines(entry.advice or ""),
            folder,
        )
        groups.setdefault(entry.code.partition(".")[0], []).append("| " + " | ".join(cells) + " |")
    parts = [_ERRORS_HEAD]
    for group, lines in groups.items():
        parts.append("\n".join([f"## {group}", "", _ERROR_COLUMNS, *lines, ""]))
    return "\n".join(parts)


def render_alerts() -> str:
    """Return the text of docs/alerts.md."""
    rules = _PAGES.parent / "infra" / "deploy" / "alerts.yaml"
    lines = [_ALERTS_HEAD]
    for name, kind in INCIDENT_KINDS.items():
        after = "at once" if kind["after"] == "0s" else kind["after"]
        texts = (kind["says"], kind["next"], kind["guarantee"])
        lines.append(_join_cells(f"`{name}`", "tidegate", kind["severity"], after, *texts))
    for group in YAML(typ="safe").load(rules)["groups"]:
        lines += [_render_alert(rule) for rule in group["rules"]]
    return "\n".join(lines) + "\n"


def _render_alert(rule: dict[str, Any]) -> str:
    """Return the row of one Prometheus rule."""
    notes = rule["annotations"]
    texts = [_ALERT_VARIABLE.sub(r"{\1}", notes[name]) for name in ("summary", "action")]
    return _join_cells(
        f"`{rule['alert']}`",
        "Prometheus",
        rule["labels"]["severity"],
        rule.get("for", "at once"),
        *texts,
        notes["guarantee"],
    )


def _join_cells(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(_join_lines(cell) for cell in cells)} |"


def render_error_codes() -> str:
    """Return the text of operators/web/errors.html: the rows of docs/errors.md, without folders."""
    heads = ("Class", "What happened", "What was kept", "What to do")
    rows = []
    for _, entry in list_catalogue():
        texts = (entry.message, entry.kept or "", entry.advice or "")
        values = (entry.error.failure_class.value, *map(_join_lines, texts))
        cells = (
            f'<td class="wrap" data-head="{head}">{html.escape(value)}'
            for head, value in zip(heads, values, strict=True)
        )
        rows.append(f'<tr id="{entry.code}"><td>{entry.code}{"".join(cells)}')
    return "\n".join(
        [
            '<!doctype html><html lang="en">',
            '<meta name="viewport" content="width=device-width"><title>Error codes</title>',
            '<link rel="icon" href="data:,"><link rel="stylesheet" href="assets/style.css">',
            '<script src="assets/theme.js"></script>',
            "<main><h1>Error codes</h1>",
            f"<table><thead><tr><th>{'<th>'.join(('Code', *heads))}<tbody>",
            *rows,
            "</table>",
            "",
        ]
    )


def write_pages(*, check: bool) -> list[str]:
    """Write the pages, or only compare them; return the names of those that were out of date."""
    stale = []
    # The folder is no package, and this file is also run as a script.
    sys.path.insert(0, str(_PAGES.parent))
    from docs.command_output import build_schema, render_page

    pages = {
        "options.md": render_options(),
        "errors.md": render_errors(),
        "alerts.md": render_alerts(),
        "command-output.md": render_page(),
        "command-output.json": json.dumps(build_schema(), indent=1) + "\n",
        "../operators/web/errors.html": render_error_codes(),
    }
    for name, text in pages.items():
        page = _PAGES / name
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                page.write_text(text, encoding="utf-8")
    return stale


def main() -> int:
    """Run the command; return 1 when ``--check`` finds a page out of date."""
    check = "--check" in sys.argv[1:]
    stale = write_pages(check=check)
    for name in stale:
        print(f"docs/{name}: " + ("out of date; run `make docs`" if check else "written"))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
