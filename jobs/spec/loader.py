"""Read a pipeline spec from YAML. A bad spec names file, line, field, what was found and what is allowed."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.jobs.spec.pipeline import PipelineSpec

__all__ = ["load_spec", "parse_spec"]

Location = tuple[int | str, ...]


def load_spec(path: str | Path) -> PipelineSpec:
    """Read and validate one pipeline spec.

    Raises:
        ConfigurationError: no such file, not YAML, or a field is wrong; the message lists every finding with its line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the spec {path}: {error.strerror or error}",
            code="spec.unreadable",
            advice="give the path of a pipeline YAML file, for example dags/pipelines/flights.yaml",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text", code="spec.unreadable") from error
    return parse_spec(text, where=str(path))


def parse_spec(text: str, *, where: str = "<spec>") -> PipelineSpec:
    """Validate YAML text; `where` names it in errors.

    Raises:
        ConfigurationError: as in `load_spec`.
    """
    try:
        raw = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise _bad(where, [f"{where}:{line}: not valid YAML: {error.problem or error.context}"]) from error
    except YAMLError as error:
        raise _bad(where, [f"{where}:1: not valid YAML: {error}"]) from error
    if not isinstance(raw, dict):
        raise _bad(where, [f"{where}:1: a spec is a mapping with apiVersion, name, sources; found {_kind(raw)}"])
    try:
        return PipelineSpec.model_validate(_plain(raw), context={"yaml": True})
    except ValidationError as error:
        raise _bad(where, _findings(where, raw, error), pipeline=str(raw.get("name", "")) or None) from error


def _bad(where: str, findings: list[str], pipeline: str | None = None) -> ConfigurationError:
    return ConfigurationError(
        "\n".join(findings),
        code="spec.invalid",
        pipeline=pipeline,
        kept="nothing was started or changed",
        advice=f"mend {where}; `tidegate schema` prints every field with its choices",
    )


def _findings(where: str, raw: Any, error: ValidationError) -> list[str]:
    return [_finding(where, raw, item) for item in error.errors(include_url=False, include_context=True)]


def _finding(where: str, raw: Any, item: Any) -> str:
    location: Location = item["loc"]
    field = ".".join(str(part) for part in location) or "spec"
    line = _line(raw, location)
    kind = item["type"]
    if kind == "extra_forbidden":
        message = "unknown field" + _suggestion(location)
    elif kind == "missing":
        message = "required field is missing"
    else:
        message = item["msg"].removeprefix("Value error, ")
        found = item.get("input")
        if isinstance(found, str | int | float | bool) or found is None:
            message += f"; found {found!r}"
    return f"{where}:{line}: {field}: {message}"


def _suggestion(location: Location) -> str:
    allowed = _allowed(location[:-1])
    close = difflib.get_close_matches(str(location[-1]), allowed, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    return f"{hint or ''}; allowed here: {', '.join(allowed)}" if allowed else hint


def _allowed(path: Location) -> list[str]:
    """Field names of the model at a location, by walking the model tree with it."""
    model: Any = PipelineSpec
    for part in path:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            model = _inner(model)  # a mapping: its key was consumed by the part
            continue
        fields = {(f.alias or n): f for n, f in model.model_fields.items()}
        if part not in fields:
            return []
        model = _model_of(fields[part].annotation)
    if isinstance(model, type) and issubclass(model, BaseModel):
        return [f.alias or n for n, f in model.model_fields.items()]
    return []


def _model_of(annotation: Any) -> Any:
    """The model, or mapping to models, inside an annotation such as ``X | None`` or ``dict[Name, X]``."""
    if isinstance(annotation, type) and not getattr(annotation, "__args__", None):
        return annotation
    if getattr(annotation, "__origin__", None) is dict:
        return annotation
    models = [_model_of(a) for a in getattr(annotation, "__args__", ())]
    return next((m for m in models if isinstance(m, type) and issubclass(m, BaseModel)), None)


def _inner(annotation: Any) -> Any:
    arguments = getattr(annotation, "__args__", ())
    return _model_of(arguments[-1]) if arguments else None


def _line(raw: Any, location: Location) -> int:
    """1-based line of the deepest part of the location that stands in the YAML."""
    line, node = 1, raw
    for part in location:
        try:
            if isinstance(node, CommentedMap) and part in node:
                line = node.lc.key(part)[0] + 1
            elif isinstance(node, CommentedSeq) and isinstance(part, int):
                line = node.lc.item(part)[0] + 1
            node = node[part]
        except (KeyError, IndexError, TypeError):
            break
    return line


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value) if kind is not bool else bool(value)
    return value


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", type(None): "nothing"}.get(type(value), type(value).__name__)
