"""The one table of changes: which rule each field of a spec has (`spec_changes.toml`).

A field is named as in YAML, with ``*`` for a name that users choose: ``windows.*.lateness``. A
section may have one rule for all fields below it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import BaseModel

from tidegate.json_types import JsonObject, read_data_file

from .job_spec import JobSpec
from .pipeline import PipelineSpec

SPEC_CHANGES: Final[JsonObject] = read_data_file(__package__, "spec_changes.toml")


class ChangeEffect(StrEnum):
    """What a change of the spec does: it keeps the state it concerns, drops it, or is refused."""

    KEPT = "kept"
    DROPPED = "dropped"
    REFUSED = "refused"


class RuleCondition(StrEnum):
    """When a rule holds; otherwise the change is kept."""

    ALWAYS = "always"
    OPEN = "open"
    PRESENCE = "presence"
    WAITING = "waiting"
    STREAM = "stream"
    HAD = "had"
    REOPENS = "reopens"
    OWN = "own"


@dataclass(frozen=True)
class FieldRule:
    """What becomes of the state if a field changes.

    Attributes:
        name: of the rule.
        effect: the effect if the rule holds.
        when: the condition under which it holds.
        why: what follows from it; for a refused change also what to do instead.
    """

    name: str
    effect: ChangeEffect
    when: RuleCondition
    why: str

    @property
    def is_compared(self) -> bool:
        """Whether the field can matter to rows or state."""
        return self.name != "not_compared"


RULES: Final = {
    name: FieldRule(name, ChangeEffect(rule["effect"]), RuleCondition(rule["when"]), rule["why"])
    for name, rule in SPEC_CHANGES["rules"].items()
}
"""Name and rule."""
FIELDS: Final[dict[type[BaseModel], dict[str, str]]] = {
    PipelineSpec: SPEC_CHANGES["fields"]["pipeline"],
    JobSpec: SPEC_CHANGES["fields"]["job"],
}
"""Model of a spec -> field or section -> name of its rule."""


def find_field_rule(model: type[BaseModel], path: str) -> FieldRule:
    """Return the rule of a field: its own, or that of the nearest section above it.

    Args:
        model: the spec's.
        path: of the field, with ``*`` for names that users choose.

    Raises:
        KeyError: neither the field nor a section above it has a rule.
    """
    fields, parts = FIELDS[model], path.split(".")
    for length in range(len(parts), 0, -1):
        rule = fields.get(".".join(parts[:length]))
        if rule is not None:
            return RULES[rule]
    raise KeyError(path)


def list_spec_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, ...]]:
    """Yield each field of a spec that has no fields below it, with the sections above it.

    The names go from the section on top to the field itself.
    """
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        below = [*_list_models(field.annotation, path)]
        if not below:
            yield (path,)
        for inner, inside in below:
            for names in list_spec_fields(inner, f"{inside}."):
                yield (path, *names)


def _list_models(annotation: Any, path: str) -> Iterator[tuple[type[BaseModel], str]]:
    """The models that a value of this type may hold, and where they are."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        # An aggregate is written as one text.
        if "expression" not in annotation.model_fields:
            yield annotation, path
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is dict:
        yield from _list_models(arguments[-1], f"{path}.*")
    elif origin is Annotated:
        yield from _list_models(arguments[0], path)
    else:
        for one in arguments:
            yield from _list_models(one, path)
