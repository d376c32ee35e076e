"""Masks the secrets that a spec should not hold but may: in the stored spec and in its text.

What is written as ``env:NAME`` or ``${NAME}`` stays, because it is not a secret.
"""

import re
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from tidegate.secret_masks import (
    MASK,
    SECRET_WORDS,
    is_secret_name,
    is_secret_option,
    mask_address,
    mask_arguments,
    mask_text,
)

from .event_time_options import SpecModel

Spec = TypeVar("Spec", bound=SpecModel)

# Sections whose keys are options of other systems.
_OPTION_SECTIONS = frozenset({"options", "catalog_options", "conf"})
# Sections whose keys are names that users choose; their values are types and names.
_NAMED_BY_USERS = frozenset({"schema", "columns", "renamed", "headers", "keys", "severity"})
_KEY_IN_YAML = re.compile(r"""^(\s*(?:-\s+)?["']?)([\w.\-]+)(["']?\s*:)(\s.*|)$""")
_SECRET_IN_YAML = re.compile(
    rf"""[\w.\-]*{SECRET_WORDS}[\w.\-]*["']?\s*:(?!\s*["']?(?:env:|\$\{{))""", re.IGNORECASE
)
# The path of a webhook's address lets people post.
_WEBHOOK = re.compile(r"""((?<![\w.\-])url["']?\s*:\s*["']?https?://[^/\s"',}]+/)[^\s"',}$]+""")


def mask_secrets(spec: Spec) -> Spec:
    """Return the spec of a pipeline or job with ``***`` for its secrets.

    Secret are passwords in addresses, fields with a secret's name, options of other systems unless
    they are known to be harmless (`is_secret_option`), the address of a webhook behind its host,
    and arguments of a job behind an option with a secret's name. Columns and other names that
    users choose are not judged. Without a secret, the spec itself is returned.

    Users who may read the bucket may read the specs in it, so these must not hold the keys of
    other systems.
    """
    data = spec.model_dump(mode="json", by_alias=True)
    masked = _mask_value("", data)
    return spec if masked == data else type(spec).model_validate(masked)


def fill_masks(masked: Spec, spec: Spec) -> Spec:
    """Return a masked spec with the secrets that another spec holds in the same places.

    A secret is taken only if its masked form is the same.
    """
    ours = masked.model_dump(mode="json", by_alias=True)
    hidden = mask_secrets(spec).model_dump(mode="json", by_alias=True)
    filled = _fill_value(ours, hidden, spec.model_dump(mode="json", by_alias=True))
    return masked if filled == ours else type(masked).model_validate(filled)


def _fill_value(ours: Any, hidden: Any, open_value: Any) -> Any:
    if isinstance(ours, dict) and isinstance(hidden, dict):
        return {
            name: _fill_value(part, hidden.get(name), open_value.get(name))
            for name, part in ours.items()
        }
    if isinstance(ours, str) and MASK in ours and ours == hidden:
        return open_value
    is_list = isinstance(ours, list) and any(MASK in str(part) for part in ours)
    return open_value if is_list and ours == hidden else ours


def mask_field(location: tuple[int | str, ...], value: str) -> str:
    """Return the value of a spec's field as an error may show it.

    Args:
        location: names of the sections around the field, and its own.
        value: its text, as the error writes it.
    """
    names = [str(part) for part in location]
    if not names or _NAMED_BY_USERS & set(names[:-1]):
        return value
    if is_secret_name(names[-1]):
        return MASK
    if _OPTION_SECTIONS & set(names[:-1]) and is_secret_option(names[-1], value.strip("'")):
        return MASK
    return mask_text(value)


def mask_spec_lines(text: str) -> list[str]:
    """Return the lines of a spec with ``***`` from each secret on, also if it is not valid YAML.

    The same is secret as in `mask_secrets`; in a line that holds several options, all of them are.
    Deeper lines below a secret are part of its value.
    """
    lines: list[str] = []
    secret_depth: int | None = None
    options_depth: int | None = None
    for line in map(mask_text, text.splitlines()):
        depth = len(line) - len(line.lstrip())
        if secret_depth is not None and (depth > secret_depth or not line.strip()):
            lines.append(MASK)
            continue
        if options_depth is not None and line.strip() and depth <= options_depth:
            options_depth = None
        end = _find_secret(line, in_options=options_depth is not None)
        secret_depth = None if end is None else depth
        lines.append(_WEBHOOK.sub(rf"\1{MASK}", line) if end is None else f"{line[:end]} {MASK}")
        key = _KEY_IN_YAML.match(line)
        if key is not None and key[2] in _OPTION_SECTIONS and options_depth is None:
            options_depth = depth
    return lines


def _find_secret(line: str, *, in_options: bool) -> int | None:
    """Where the secret of a line of YAML begins, behind its name; None without one."""
    key = _KEY_IN_YAML.match(line)
    if key is not None:
        name, value = key[2], key[4].strip()
        if _is_secret_line(name, value, in_options=in_options):
            return key.end(3)
    found = _SECRET_IN_YAML.search(line, 0 if key is None else key.end(3))
    return found.end() if found else None


def _is_secret_line(name: str, value: str, *, in_options: bool) -> bool:
    if name in _OPTION_SECTIONS:
        return value.startswith("{") and value != "{}"
    plain = value.strip("\"'")
    if not in_options:
        return is_secret_name(name) and not plain.startswith(("env:", "${"))
    return plain != "" and not plain.startswith("#") and is_secret_option(name, plain)


def _mask_value(name: str, value: Any, *, is_option: bool = False) -> Any:
    if isinstance(value, dict):
        return _mask_section(name, value, is_option=is_option)
    if isinstance(value, list):
        if name == "args":
            return mask_arguments(value)
        return [_mask_value(name, part, is_option=is_option) for part in value]
    if not isinstance(value, str) or value.startswith(("env:", "${")):
        return value
    if is_secret_name(name) or (is_option and is_secret_option(name, value)):
        return MASK
    return mask_text(value)


def _mask_section(name: str, section: dict[str, Any], *, is_option: bool) -> dict[str, Any]:
    chosen = name in _NAMED_BY_USERS
    options = is_option or name in _OPTION_SECTIONS
    masked = {
        key: _mask_value("" if chosen else str(key), part, is_option=options and not chosen)
        for key, part in section.items()
    }
    if section.get("kind") == "webhook" and isinstance(section.get("url"), str):
        masked["url"] = _mask_webhook(section["url"])
    return masked


def _mask_webhook(url: str) -> str:
    """The address without its path, which is what lets somebody post."""
    if "${" in url or url.startswith("env:"):
        return mask_address(url)
    parts = urlsplit(mask_address(url))
    return urlunsplit((parts.scheme, parts.netloc, f"/{MASK}", "", "")) if parts.path else url
