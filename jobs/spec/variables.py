"""Variables of the environment in the values of a spec: ``${NAME}`` and ``${NAME:-default}``."""

import re
from collections.abc import Mapping
from typing import Final

VARIABLE: Final = re.compile(r"\$\$\{|\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")
"""A variable, or ``$${``, the way to write the characters ``${`` themselves."""


def replace_variables(text: str, environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Replace the variables of a text, and ``$${`` by ``${``.

    Returns:
        The text, and the names of the variables that are not set and have no default. These stay as
        they are written.

    >>> replace_variables("${A}/${B:-b}/$${A}/${C}", {"A": "a"})
    ('a/b/${A}/${C}', ['C'])
    """
    missing: list[str] = []

    def read_variable(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if name is None:
            return "${"
        value = environment.get(name, default)
        if value is None:
            missing.append(name)
            return match[0]
        return value

    return VARIABLE.sub(read_variable, text), missing
