"""docs/command-output.json: the JSON Schema of what commands print with ``--json``."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import typer.main
from docs.command_output import KINDS
from tests.cli.conftest import refuse_undocumented

from tidegate.jobs.cli import main, output

_PRINTERS = {"print_envelope": 0, "print_result": 1}  # function -> place of the kind


def _list_printed_kinds() -> set[str]:
    """Every kind that a module of the command line prints."""
    found = set()
    for module in Path(output.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Call):
                place = _PRINTERS.get(getattr(node.func, "attr", getattr(node.func, "id", "")))
                kind = None if place is None else node.args[place]
                if isinstance(kind, ast.Constant):
                    found.add(str(kind.value))
    return found


def _list_json_commands(group: Any, *names: str) -> set[str]:
    """Every command with ``--json``."""
    if commands := getattr(group, "commands", None):
        return {one for n, c in commands.items() for one in _list_json_commands(c, *names, n)}
    return {" ".join(names)} if any("--json" in p.opts for p in group.params) else set()


def test_every_kind_and_command_has_a_schema() -> None:
    """`quality` is printed by the process that computes it."""
    assert _list_printed_kinds() | {"quality"} == {*KINDS}
    documented = " ".join(
        command.replace("splice late, dead-letters, file, part", "late dead-letters file part")
        for command, _ in KINDS.values()
    ).split()
    commands = _list_json_commands(typer.main.get_command(main.app))
    assert len(commands) >= 27
    assert {command for command in commands if command.split()[-1] not in documented} == set()


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"table": "w", "rows": 1, "address": None}, None),
        ({"table": "w", "rows": 1, "address": None, "more": 1}, "'more' was unexpected"),
        ({"table": "w", "rows": 1}, "'address' is a required property"),
        ({"table": "w", "rows": "1", "address": None}, "'1' is not of type 'integer'"),
    ],
)
def test_the_tests_of_commands_notice_another_shape(row: dict[str, Any], fault: str | None) -> None:
    """A field that is not documented, missing, or of another type fails."""
    envelope = {"schema_version": 1, "kind": "tables", "data": [row]}
    if fault is None:
        refuse_undocumented(envelope)
        return
    with pytest.raises(AssertionError, match=fault):
        refuse_undocumented(envelope)


def test_an_unknown_kind_is_noticed() -> None:
    """The kinds are a closed list."""
    with pytest.raises(AssertionError, match="is not one of"):
        refuse_undocumented({"schema_version": 1, "kind": "other", "data": {}})
