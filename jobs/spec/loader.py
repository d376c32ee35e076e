"""Reads the spec of a pipeline or of a job from YAML.

An error names file, line, field, what was found and what is allowed.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from tidegate.errors import ConfigurationError, suggest_name
from tidegate.json_types import JsonObject, read_data_file
from tidegate.secret_masks import mask_text

from .environments import find_environment_files, list_fixed_differences, merge_values
from .errors import SPEC_INVALID, SPEC_IS_JOB, SPEC_NOT_TEXT, SPEC_UNREADABLE
from .ineffective_fields import is_replaced_later, list_ineffective_fields
from .job_spec import JobSpec
from .pipeline import BATCH_RUN_MARK, PipelineSpec, SourceSpec
from .spec_masks import mask_field
from .variables import VARIABLE, replace_variables
from .yaml_text import YamlTextError, read_yaml

Location = tuple[int | str, ...]
_FOREIGN_FIELDS = {
    name: (field["ours"], field["otherwise"])
    for field in read_data_file(__package__, "foreign_fields.toml")["fields"]
    for name in field["names"]
}
_NAME_LINE = re.compile(r"""^name:\s*["']?([\w.\-]+)""", re.MULTILINE)
S = TypeVar("S", PipelineSpec, JobSpec)


@dataclass(frozen=True)
class SpecText:
    """A spec as it is written.

    Attributes:
        files: name and YAML of the spec, and of the files of its environment in their order.
        merged: the spec of all of them, as plain values.
    """

    files: Sequence[tuple[str, JsonObject]]
    merged: JsonObject

    @property
    def name(self) -> str | None:
        """Name of the pipeline or job, as it is written."""
        return str(self.merged.get("name", "")) or None

    @property
    def is_job(self) -> bool:
        """Whether it is the spec of a job."""
        return self.merged.get("kind") == "job"

    @property
    def model(self) -> type[BaseModel]:
        """The model of the spec."""
        return JobSpec if self.is_job else PipelineSpec

    def format_findings(self, mistakes: Iterable[tuple[Location, str]]) -> list[str]:
        """As the function `format_findings`, each mistake in the file that its place is from."""
        groups: list[list[tuple[Location, str]]] = [[] for _ in self.files]
        for place, message in mistakes:
            known = [_count_known_parts(raw, place) for _, raw in self.files]
            # The last of those that say most about the place: it is merged over the others.
            owner = len(known) - 1 - known[::-1].index(max(known))
            groups[owner].append((place, message))
        return [
            finding
            for (where, raw), own in zip(self.files, groups, strict=True)
            for finding in format_findings(where, raw, own)
        ]


def load_spec(path: str | Path) -> PipelineSpec:
    """Read and validate one pipeline spec.

    Raises:
        ConfigurationError: no such file, not YAML, a field is wrong, or it is a job. The message
            lists all wrong fields with their lines. Rules over several fields of a section are
            checked once these are right, one at a time.
    """
    spec = load_any_spec(path)
    if isinstance(spec, JobSpec):
        raise SPEC_IS_JOB(pipeline=spec.name, path=path)
    return spec


def load_any_spec(
    path: str | Path, environment: str | None = None, *, needs_variables: bool = True
) -> PipelineSpec | JobSpec:
    """Read and validate the spec of a pipeline, or of a job if it says `kind: job`.

    Args:
        path: of its file.
        environment: as `find_environment_files` takes it.
        needs_variables: refuse a variable that is not set; otherwise it stays as it is written.

    Raises:
        ConfigurationError: as in `load_spec`, but a job is accepted.
    """
    text = read_spec_text(path, environment)
    if text.is_job:
        return _validate_spec(JobSpec, text, needs_variables=needs_variables)
    return _validate_spec(PipelineSpec, text, needs_variables=needs_variables)


def read_spec_text(path: str | Path, environment: str | None = None) -> SpecText:
    """Read a spec and the files of its environment, and merge them.

    Raises:
        ConfigurationError: no such file or environment, not YAML, or the environment differs where
            it must not.
    """
    path = Path(path)
    paths = [path, *find_environment_files(path, environment)]
    files = [(str(one), _read_file(one)) for one in paths]
    text = SpecText(files, to_plain_value(files[0][1]))
    findings: list[str] = []
    for where, raw in files[1:]:
        overlay = to_plain_value(raw)
        fixed = list_fixed_differences(text.model, text.merged, overlay)
        findings += format_findings(where, raw, fixed)
        text = SpecText(files, merge_values(text.merged, overlay))
    if findings:
        raise _invalid_spec_error(str(path), findings, pipeline=text.name)
    return text


def render_spec(path: str | Path, environment: str | None = None) -> str:
    """Return a spec as YAML: with the files of its environment, and with its variables replaced.

    Raises:
        ConfigurationError: as `read_spec_text`.
    """
    text = read_spec_text(path, environment)
    values, _ = _replace_variables(text.model, text.merged)
    # What it holds now are no variables.
    escaped = _map_texts(text.model, values, lambda _, value: value.replace("${", "$${"))
    rendered = StringIO()
    yaml = YAML(typ="safe", pure=True)
    # Rows of equal time are released in the order of the sources.
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # None in ruamel
    yaml.dump(escaped, rendered)
    return rendered.getvalue()


def _read_file(path: Path) -> JsonObject:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise SPEC_UNREADABLE(path=path, reason=error.strerror or error) from error
    except UnicodeDecodeError as error:
        raise SPEC_NOT_TEXT(path=path) from error
    return _read_mapping(text, str(path))


def read_spec_name(path: Path) -> str:
    """Return the name of a pipeline or job, also if its file is not a valid spec.

    Without a line for it, it is the name of the file.
    """
    with suppress(OSError, UnicodeDecodeError):
        found = _NAME_LINE.search(path.read_text("utf-8"))
        if found:
            return found[1]
    return path.stem


def parse_spec(text: str, *, where: str = "<spec>") -> PipelineSpec:
    """Validate the YAML text of a pipeline; `where` names it in errors.

    Raises:
        ConfigurationError: not YAML, or a field is wrong; also for the text of a job.
    """
    raw = _read_mapping(text, where)
    return _validate_spec(PipelineSpec, SpecText([(where, raw)], to_plain_value(raw)))


def _read_mapping(text: str, where: str) -> JsonObject:
    try:
        raw = read_yaml(text)
    except YamlTextError as error:
        found = f"{where}:{error.line}: not valid YAML: {error.reason}"
        raise _invalid_spec_error(where, [found]) from error
    if not isinstance(raw, dict):
        kinds = {list: "a list", str: "text", type(None): "nothing"}
        found = kinds.get(type(raw), type(raw).__name__)
        raise _invalid_spec_error(
            where,
            [f"{where}:1: a spec is a mapping with apiVersion, name, sources; found {found}"],
        )
    return raw


def _validate_spec(model: type[S], text: SpecText, *, needs_variables: bool = True) -> S:
    where = text.files[0][0]
    values, unset = _replace_variables(model, text.merged)
    if unset and needs_variables:
        raise _invalid_spec_error(where, text.format_findings(unset), pipeline=text.name)
    try:
        spec = model.model_validate(values, context={"yaml": True})
    except ValidationError as error:
        items = error.errors(include_url=False, include_context=True)
        items = [item for item in items if not _is_rest(item)] or items
        mistakes = [(item["loc"], _describe_item(model, item)) for item in items]
        findings = text.format_findings(mistakes)
        raise _invalid_spec_error(where, findings, pipeline=text.name) from error
    problems = list_ineffective_fields(spec)
    if BATCH_RUN_MARK in spec.name:
        reserved = f"{BATCH_RUN_MARK!r} is reserved for batch runs of another pipeline"
        problems.append((("name",), reserved))
    if problems:
        raise _invalid_spec_error(where, text.format_findings(problems), pipeline=spec.name)
    return spec


def _replace_variables(
    model: type[BaseModel], values: JsonObject
) -> tuple[JsonObject, list[tuple[Location, str]]]:
    """Replace the variables of a spec but for those that its driver replaces.

    Returns:
        The values, and the variables that are not set, each with its place.
    """
    unset: list[tuple[Location, str]] = []

    def replace_text(place: Location, value: str) -> Any:
        text, missing = replace_variables(value, os.environ)
        unset.extend(
            (place, f"the variable {name} is not set: set it, or write ${{{name}:-default}}")
            for name in missing
        )
        if missing or text == value:
            return value
        # A variable alone may stand for a number or a truth value as well.
        return _read_scalar(text) if VARIABLE.fullmatch(value) else text

    return _map_texts(model, values, replace_text), unset


def _map_texts(
    model: type[BaseModel], value: Any, change: Callable[[Location, str], Any], place: Location = ()
) -> Any:
    """Change each text of a spec but for those whose variables its driver replaces."""
    if isinstance(value, dict):
        return {n: _map_texts(model, part, change, (*place, n)) for n, part in value.items()}
    if isinstance(value, list):
        return [_map_texts(model, part, change, (*place, i)) for i, part in enumerate(value)]
    if not isinstance(value, str) or is_replaced_later(model, place):
        return value
    return change(place, value)


def _read_scalar(text: str) -> str | int | float | bool:
    """Return a number or truth value as YAML reads it, and any other text as it is."""
    with suppress(YAMLError, ValueError, TypeError):
        value = YAML(typ="safe").load(text)
        if isinstance(value, bool | int | float):
            return value
    return text


def _invalid_spec_error(
    where: str, findings: list[str], pipeline: str | None = None
) -> ConfigurationError:
    return SPEC_INVALID(pipeline=pipeline, findings="\n".join(findings), where=where)


def locate_mistakes(path: Path, mistakes: Sequence[tuple[Location, str]]) -> ConfigurationError:
    """Return the error for mistakes that were found in a spec after it was read.

    The files are read again, to find the lines. `mistakes` are those of `format_findings`.
    """
    text = read_spec_text(path)
    return _invalid_spec_error(str(path), text.format_findings(mistakes), pipeline=text.name)


def format_findings(where: str, raw: Any, mistakes: Iterable[tuple[Location, str]]) -> list[str]:
    """Return a line per mistake, with file, line and field.

    A mistake that is shared through an anchor is listed once. A message that begins with
    ``FIELD: `` gets the line of that field below its place.

    Args:
        where: the file.
        raw: its YAML, as ruamel's round-trip loader gives it.
        mistakes: place in the YAML, and what is wrong there.
    """
    findings: dict[tuple[int, str], str] = {}
    for location, message in mistakes:
        # Rules over several fields name the field at the beginning of their message.
        named = re.match(r"[\w.\-]+(?=: )", message)
        line = find_line(raw, (*location, *(named[0].split(".") if named else ())))
        field = ".".join(str(part) for part in location)
        field = f"{field or 'spec'}: " if field or named is None else ""
        findings.setdefault((line, message), f"{where}:{line}: {field}{message}")
    return list(findings.values())


def _is_rest(item: Any) -> bool:
    """Whether a field is what a comma in `{...}` cut off from the value before it.

    The value is refused as well, because its parenthesis is not closed.
    """
    field = str(item["loc"][-1]) if item["loc"] else ""
    return item.get("input") is None and field.count(")") > field.count("(")


def _describe_item(root: type[BaseModel], item: Any) -> str:
    location, kind = item["loc"], item["type"]
    if kind == "extra_forbidden":
        message = "unknown field" + _suggest_field(root, location)
    elif kind == "missing":
        message = "required field is missing"
    else:
        # What was found may be a secret, and everyone who sees the DAGs can read the message.
        message = mask_text(item["msg"].removeprefix("Value error, "))
        found = item.get("input")
        is_short = isinstance(found, str | int | float | bool) or found is None
        if is_short and repr(found) not in message:
            message += f"; found {mask_field(location, repr(found))}"
        if kind in ("enum", "literal_error"):
            message += suggest_name(found, re.findall(r"'([^']+)'", item["ctx"]["expected"]))
        if kind == "union_tag_invalid" and item["ctx"]["tag"] in ("delta", "iceberg"):
            message = _FOREIGN_FIELDS["format"][1]
        if location[-1:] == ("format",) and found in ("delta", "iceberg"):
            message += f"; write table: {{format: {found}}} beside path"
    return message


def _suggest_field(root: type[BaseModel], location: Location) -> str:
    allowed = _list_allowed_fields(root, location[:-1])
    if foreign := _FOREIGN_FIELDS.get(str(location[-1]).lower()):
        ours, otherwise = foreign
        return f": write {ours!r}" if ours in allowed else f": {otherwise}"
    hint = suggest_name(location[-1], allowed)
    return f"{hint}; allowed here: {', '.join(allowed)}" if allowed else hint


def _list_allowed_fields(root: type[BaseModel], path: Location) -> list[str]:
    """Field names of the model at a location, by walking the model tree with it."""
    model: Any = root
    for part in path:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            # A mapping: its key was consumed by the part.
            arguments = getattr(model, "__args__", ())
            model = _find_model(arguments[-1]) if arguments else None
            continue
        fields = {(f.alias or n): f for n, f in model.model_fields.items()}
        if part not in fields:
            return []
        model = _find_model(fields[part].annotation)
    if isinstance(model, type) and issubclass(model, BaseModel):
        return [f.alias or n for n, f in model.model_fields.items()]
    return []


def _find_model(annotation: Any) -> Any:
    """Return the model, or the mapping to models, inside ``X | None`` or ``dict[Name, X]``."""
    if isinstance(annotation, type) and not getattr(annotation, "__args__", None):
        return annotation
    if getattr(annotation, "__origin__", None) is dict:
        return annotation
    models = [_find_model(a) for a in getattr(annotation, "__args__", ())]
    return next((m for m in models if isinstance(m, type) and issubclass(m, BaseModel)), None)


def find_line(raw: Any, location: Location) -> int:
    """Return the 1-based line of the deepest part of the location that the YAML has."""
    line, node = 1, raw
    for part in location:
        try:
            if isinstance(node, CommentedMap) and part in node:
                line = _find_owner(node, part).lc.key(part)[0] + 1
            elif isinstance(node, CommentedSeq) and isinstance(part, int):
                line = node.lc.item(part)[0] + 1
            node = node[part]
        except (KeyError, IndexError, TypeError, StopIteration):
            break
    return line


def _count_known_parts(raw: Any, location: Location) -> int:
    """How many parts of a location a file has."""
    node, known = raw, 0
    for part in location:
        if not isinstance(node, dict) or part not in node:
            break
        node, known = node[part], known + 1
    return known


def _find_owner(node: CommentedMap, key: object) -> CommentedMap:
    """Return the mapping in which a key is written: this one, or one that it merges by ``<<``."""
    if key in node.lc.data:
        return node
    return next(_find_owner(merged, key) for merged in node.merge if key in merged)


def to_plain_value(value: Any) -> Any:
    """Return YAML of ruamel's round-trip loader as plain values.

    Keys become texts. Null, dates and times stay as they are.
    """
    if isinstance(value, dict):
        return {str(k): to_plain_value(v) for k, v in value.items()}
    if isinstance(value, list):
        return [to_plain_value(v) for v in value]
    # ruamel's scalars remember their style and place; pydantic's strict checks and JSON want plain
    # values. bool first, because it is an int.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


# Warnings: a spec with these is valid, and its pipeline runs.


def list_spec_warnings(spec: PipelineSpec) -> list[str]:
    """Return warnings about values that are valid but doubtful, a sentence each."""
    # Where punctuation or a capped wall clock alone moves the frontier, no single row can.
    exposed = [
        name
        for name, source in spec.sources.items()
        if source.lag is not None and source.max_jump is None
    ]
    stuck = [name for name, source in spec.sources.items() if _lacks_punctuation_rows(source)]
    folders = {name: f"{one.path.strip('/')}/" for name, one in spec.sources.items() if one.path}
    found = [
        f"sources {one} and {other} read the same objects ({folders[one]}): their rows count twice"
        for one, other in combinations(folders, 2)
        if folders[one].startswith(folders[other]) or folders[other].startswith(folders[one])
    ]
    if exposed:
        found.append(
            f"max_jump is off ({', '.join(exposed)}): one row with a time far ahead takes the"
            " frontier along, and all behind is late"
        )
    ignored = [
        name
        for name, source in spec.sources.items()
        if source.partition_by == "source"
        and "idle_timeout" in source.coalesce.model_fields_set
        and source.coalesce.idle_timeout == type(source.coalesce)().idle_timeout
        and spec.coalesce.idle_timeout != source.coalesce.idle_timeout
    ]
    if ignored:
        found.append(
            f"coalesce.idle_timeout of {', '.join(ignored)} is the default and does not count: a"
            " source that is one partition then has the output's; add a millisecond to set its own"
        )
    if spec.spark.staging != type(spec.spark)().staging:
        found.append(
            "spark.staging has no effect any more: reducers run in tasks, which share no disk with"
            " the driver; leave it out"
        )
    if stuck:
        found.append(
            f"nothing can move the frontier ({', '.join(stuck)}): only punctuation rows of the"
            " source move it, and barriers.punctuation names no value of the kind column, so"
            " nothing is ever final; name it, or set lag, punctuation.every_events or"
            " punctuation.every_span"
        )
    return found


def _lacks_punctuation_rows(source: SourceSpec) -> bool:
    """Whether only punctuation rows move the frontier, and no row can be one."""
    punctuation = source.punctuation
    if punctuation is None or source.lag is not None or source.wall_clock is not None:
        return False
    rows = source.barriers is not None and source.barriers.punctuation is not None
    return not (rows or punctuation.is_generated or punctuation.import_from is not None)


# Files that would be specs if they lay elsewhere or had another ending.

_OWN_FIELD = re.compile(r"^(?:sources|app):", re.MULTILINE)
_DEEPEST_FOLDER = 3
_NAME_FIELD = re.compile(r"^name:", re.MULTILINE)


def list_unread_specs(folder: Path) -> list[Path]:
    """Return the files below a folder that would be specs and are not read.

    A spec is read if it lies in the folder itself and its name ends in ``.yaml``. Files and folders
    whose names begin with a dot are left out, and so is what lies deeper than three folders below.
    """
    found = []
    for place, folders, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        # Airflow's DAG processor calls this whenever it parses.
        folders[:] = [name for name in folders if name[0] != "." and depth < _DEEPEST_FOLDER]
        ignored = (".yml",) if depth == 0 else (".yaml", ".yml")
        found += [Path(place, name) for name in files if name.endswith(ignored) and name[0] != "."]
    return sorted(filter(_has_fields_of_spec, found))


def _has_fields_of_spec(path: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError):
        text = path.read_text("utf-8")
        return bool(_OWN_FIELD.search(text) and _NAME_FIELD.search(text))
    return False
