"""Reads YAML with the places of its parts: of specs, test cases and suites of checks."""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError


class YamlTextError(ValueError):
    """A text that is not YAML.

    Attributes:
        line: where, from 1.
        reason: what is wrong there.
    """

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line, self.reason = line, reason


class PlacedConstructor(RoundTripConstructor):
    """Says the place of a value that Python refuses, such as a date that no calendar has."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Return the value of a node."""
        try:
            return super().construct_object(node, deep)
        except TypeError as error:  # a key with a list in it
            raise ConstructorError(None, None, "this cannot be a key", node.start_mark) from error
        except ValueError as error:
            raise ConstructorError(None, None, str(error), node.start_mark) from error


def read_yaml(text: str, constructor: type[PlacedConstructor] = PlacedConstructor) -> Any:
    """Return the values of a text, whose mappings and lists know their lines.

    Raises:
        YamlTextError: it is not YAML, or nested more deeply than Python can read.
    """
    yaml = YAML(typ="rt")
    yaml.Constructor = constructor
    try:
        return yaml.load(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise YamlTextError(line, _describe_problem(error)) from error
    except YAMLError as error:
        raise YamlTextError(1, str(error)) from error
    except TypeError as error:
        raise YamlTextError(1, "a key has a list in it") from error
    except RecursionError as error:
        raise YamlTextError(1, "it is nested too deeply") from error


def _describe_problem(error: MarkedYAMLError) -> str:
    problem = str(error.problem or error.context)
    if "'\\t'" in problem:
        return "a tab; indent with spaces"
    return problem.partition(" with value ")[0]  # of a key that is there twice
