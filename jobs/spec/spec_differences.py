"""What differs between two specs, field by field, for people."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .job_spec import SupervisedSpec
from .pipeline import PipelineSpec
from .spec_masks import mask_secrets
from .user_code import describe_code_change

_LONGEST_VALUE = 80  # characters


@dataclass(frozen=True)
class FieldDifference:
    """One field that differs.

    Attributes:
        field: its dotted name, or `code` and the name of a file.
        before: its value as JSON; None where it was not there.
        after: likewise.
    """

    field: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.field.startswith("code "):
            return f"{self.field}: {self.after}"
        return f"{self.field}: {self.before or 'absent'} -> {self.after or 'absent'}"


def list_differences(
    old: SupervisedSpec,
    new: SupervisedSpec,
    old_code: Mapping[str, str],
    new_code: Mapping[str, str],
) -> list[FieldDifference]:
    """Return the fields and the files of code that differ, in the order of their names.

    Secrets are masked before they are compared, so another secret is not listed.
    """
    return [*_list_field_differences(old, new), *_list_code_differences(old_code, new_code)]


def _list_field_differences(old: SupervisedSpec, new: SupervisedSpec) -> Iterator[FieldDifference]:
    before, after = (mask_secrets(one).model_dump(mode="json", by_alias=True) for one in (old, new))
    yield from _list_value_differences(before, after, "")
    if isinstance(old, PipelineSpec) and isinstance(new, PipelineSpec):
        for path, names in new.orders.items():
            earlier = old.orders.get(path)
            # Names that were added or removed are differences of their own.
            if earlier is not None and earlier != names and sorted(earlier) == sorted(names):
                orders = (", ".join(one) for one in (earlier, names))
                yield FieldDifference(f"order of {path}", *orders)


def _list_value_differences(before: object, after: object, path: str) -> Iterator[FieldDifference]:
    if before == after:
        return
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        yield FieldDifference(path, _format_value(before), _format_value(after))
        return
    for name in sorted(before.keys() | after.keys()):
        inner = f"{path}.{name}" if path else name
        yield from _list_value_differences(before.get(name), after.get(name), inner)


def _list_code_differences(
    old: Mapping[str, str], new: Mapping[str, str]
) -> Iterator[FieldDifference]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            change = describe_code_change(old.get(name), new.get(name))
            yield FieldDifference(f"code {name}", None, change)


def _format_value(value: object) -> str | None:
    if value is None:
        return None
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
