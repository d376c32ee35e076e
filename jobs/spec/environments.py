"""A spec that differs between environments, such as development and production.

The environment ``prod`` of ``orders.yaml`` is that file with ``envs/prod.yaml``, which is for all
specs of the folder, and then ``envs/prod/orders.yaml`` merged into it; each of the two may be
missing. Mappings are merged name by name, all else is replaced, and null deletes a field.

Environments must not differ in what results mean, so that a test in one says something about
another: `list_fixed_differences`.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from tidegate.json_types import JsonObject

from .errors import ENVIRONMENT_UNKNOWN
from .field_rules import SPEC_CHANGES, find_field_rule

ENVIRONMENT_VARIABLE: Final = "TIDEGATE_ENV"
"""Names the environment of a deployment, for commands, DAGs and drivers."""
Location = tuple[int | str, ...]
_TABLE: Final = SPEC_CHANGES["environments"]
_NAMED_BY_USERS: Final = ("sources", "windows", "streams", "pipes", "reducers")
_NOTHING: Final = object()


def find_environment_files(path: Path, environment: str | None) -> list[Path]:
    """Return the files to merge into a spec, in their order.

    Args:
        path: of the spec.
        environment: its name; None for the one that `ENVIRONMENT_VARIABLE` names. A spec without a
            folder ``envs`` beside it is the same in the environments of that variable.

    Raises:
        ConfigurationError: the spec has no such environment.
    """
    folder = path.parent / "envs"
    name = environment or os.environ.get(ENVIRONMENT_VARIABLE)
    if not name or (environment is None and not folder.is_dir()):
        return []
    candidates = [folder / f"{name}.yaml", folder / name / path.name]
    found = [file for file in candidates if file.is_file()]
    if not found:
        raise ENVIRONMENT_UNKNOWN(
            environment=name,
            path=path,
            files=" nor ".join(map(str, candidates)),
            known=", ".join(list_environments(path)) or "none",
        )
    return found


def list_environments(path: Path) -> list[str]:
    """Return the names of the environments of a spec."""
    folder = path.parent / "envs"
    shared = {file.stem for file in folder.glob("*.yaml")}
    return sorted(shared | {file.parent.name for file in folder.glob(f"*/{path.name}")})


def merge_values(base: Any, overlay: Any) -> Any:
    """Merge a value of an environment into that of the spec; null deletes.

    >>> merge_values({"a": {"b": 1, "c": 2}, "d": [1, 2]}, {"a": {"b": None}, "d": [3]})
    {'a': {'c': 2}, 'd': [3]}
    """
    if not isinstance(base, dict) or not isinstance(overlay, dict):
        return overlay
    merged = dict(base)
    for name, value in overlay.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_values(base.get(name), value)
    return merged


def list_fixed_differences(
    model: type[BaseModel], base: Mapping[str, Any], overlay: Mapping[str, Any]
) -> Iterator[tuple[Location, str]]:
    """Yield the places in which an environment differs and must not, each with what to do instead.

    Args:
        model: the spec's.
        base: the spec.
        overlay: a file of the environment.
    """
    for place in _list_differences(base, overlay, ()):
        fixed = _explain_fixed(model, place)
        if fixed is not None:
            yield place, f"environments must not differ here: {fixed}; change it in the spec itself"


def _list_differences(base: Any, overlay: Any, place: Location) -> Iterator[Location]:
    """The fields that the overlay changes; a section that it adds or deletes is one."""
    if isinstance(overlay, dict) and (isinstance(base, dict) or base is _NOTHING):
        for name, value in overlay.items():
            own = base.get(name, _NOTHING) if isinstance(base, dict) else _NOTHING
            yield from _list_differences(own, value, (*place, name))
    elif overlay != base and not (overlay is None and base is _NOTHING):
        yield place


def _explain_fixed(model: type[BaseModel], place: Location) -> str | None:
    names = [str(part) for part in place]
    if names[0] in _NAMED_BY_USERS and len(names) <= 2:
        return "sources, windows and streams are the same in all"
    if names[0] in _NAMED_BY_USERS:
        names[1] = "*"
    path = ".".join(names)
    for field, why in _TABLE["fields"].items():
        if path == field:
            return str(why)
    with suppress(KeyError):  # an unknown field is refused by the model
        reason: str | None = _TABLE["rules"].get(find_field_rule(model, path).name)
        return reason
    return None


def list_fixed_fields() -> JsonObject:
    """Return the rules and fields in which environments must not differ, each with the reason."""
    return {**_TABLE["rules"], **_TABLE["fields"]}
