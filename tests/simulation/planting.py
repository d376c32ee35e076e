"""What a planted bug is, and how a piece of the product is reworded."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tidegate.checkpoints.slot_log import SlotLog

Patches = list[Any]


@dataclass(frozen=True)
class Mutant:
    """A bug.

    Attributes:
        make: the patches that put it in.
        rate: fault rate at which to look for it; None: as the seed says.
        focus: the kind of fault and the step that it is about; None: as the seed says.
        sink: the kind of sink beside the tables; None: as the seed says.
        fault: the fault of docs/track-record.md that the bug brings back; empty if it was never
            in the product.
    """

    name: str
    make: Callable[[], Patches]
    rate: float | None = None
    focus: tuple[str, str] | None = None
    sink: str | None = None
    fault: str = ""


SEAL = SlotLog.seal


def reword(owner: Any, name: str, text: str, instead: str) -> Any:
    """The function as it is, with a piece of its text replaced: a repair taken out, or a bug put in.

    Raises:
        AssertionError: the text is not there once; then the repair looks different by now.
    """
    there = inspect.getattr_static(owner, name)
    function: Any = there.fget if isinstance(there, property) else there
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(text) == 1, f"{name} does not have {text!r} once"
    scope: dict[str, Any] = {}
    code = compile(
        f"from __future__ import annotations\n{source.replace(text, instead)}", name, "exec"
    )
    exec(code, function.__globals__, scope)
    return patch.object(owner, name, scope[name])


def replace_seal(replacement: Callable[..., Any]) -> Any:
    """The log seals otherwise."""
    return patch.object(SlotLog, "seal", replacement)
