"""Refuses side effects while a fold runs.

Any run may be a replay, and a replay must not change anything outside the fold. See
`docs/decisions/0032-folds-have-no-side-effects-and-json-states.md`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_REFUSED_EVENTS: Final = frozenset(
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
_thread_state = threading.local()
_install_lock = threading.Lock()
_installed: list[bool] = []


class SideEffectError(Exception):
    """A fold tried a side effect.

    Its author has to move that to a reader of the dispatched rows.
    """


class _SideEffectGuard:
    """Held while folds run."""

    def raise_refused(self) -> None:
        """Raise what was refused since the last call, even if the fold swallowed the error."""
        refused, _thread_state.refused = _thread_state.refused, None
        if refused is not None:
            raise SideEffectError(refused)


@contextmanager
def refuse_side_effects() -> Iterator[_SideEffectGuard]:
    """Refuse to write files, connect and start processes in this thread.

    These raise `SideEffectError`.
    """
    _install_audit_hook()
    _thread_state.refused = None
    _thread_state.on = True
    try:
        yield _SideEffectGuard()
    finally:
        _thread_state.on = False


def _install_audit_hook() -> None:
    with _install_lock:
        if not _installed:
            # A hook can never be removed again, so it checks the thread's flag first.
            sys.addaudithook(_refuse_audit_event)
            _installed.append(True)


def _refuse_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
    if not getattr(_thread_state, "on", False):
        return
    # An import inside the fold may write the interpreter's cache.
    if arguments and "__pycache__" in str(arguments[0]):
        return
    if event in _REFUSED_EVENTS or (event == "open" and _opens_for_writing(arguments)):
        _thread_state.refused = f"{event} {arguments[0] if arguments else ''}".strip()
        raise SideEffectError(_thread_state.refused)


def _opens_for_writing(arguments: tuple[Any, ...]) -> bool:
    path, mode, flags = arguments
    if isinstance(path, int):  # a file descriptor: opening it was checked before
        return False
    named = isinstance(mode, str) and any(letter in mode for letter in "wax+")
    return named or bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
