"""Side effects are refused while a fold runs: any run may be a replay, and a replay must do nothing but compute."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

__all__ = ["SideEffectError", "pure"]

_REFUSED: Final = frozenset(
    {
        "socket.connect",
        "socket.sendto",
        "socket.bind",
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.fork",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.mkdir",
        "os.rmdir",
        "os.truncate",
        "os.putenv",
    }
)
_state = threading.local()
_installing = threading.Lock()
_installed: list[bool] = []


class SideEffectError(Exception):
    """A fold tried to change the world. Its author has to move that to a reader of the dispatched rows."""


class _Guard:
    """Held while folds run."""

    def check(self) -> None:
        """Raise what was refused since the last look, even if the code swallowed it."""
        refused, _state.refused = _state.refused, None
        if refused is not None:
            raise SideEffectError(refused)


@contextmanager
def pure() -> Iterator[_Guard]:
    """In this thread, writing files, connecting and starting processes raise `SideEffectError`."""
    _install()
    _state.refused = None
    _state.on = True
    try:
        yield _Guard()
    finally:
        _state.on = False


def _install() -> None:
    with _installing:
        if not _installed:
            sys.addaudithook(_hook)  # can never be taken out again: it asks the thread's flag first
            _installed.append(True)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not getattr(_state, "on", False):
        return
    if arguments and "__pycache__" in str(arguments[0]):  # the interpreter's own cache of an import inside the fold
        return
    if event in _REFUSED or (event == "open" and _writes(arguments)):
        _state.refused = f"{event} {arguments[0] if arguments else ''}".strip()
        raise SideEffectError(_state.refused)


def _writes(arguments: tuple[Any, ...]) -> bool:
    path, mode, flags = arguments
    if isinstance(path, int):  # a file that is open already: opening it was judged
        return False
    named = isinstance(mode, str) and any(letter in mode for letter in "wax+")
    return named or bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
