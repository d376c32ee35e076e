"""How many arenas the C library's `malloc` of a driver may have."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Final

_M_ARENA_MAX: Final = -8  # of malloc.h
_ARENAS: Final = 2


def limit_memory_arenas() -> None:
    """Let this process have two arenas, unless MALLOC_ARENA_MAX says otherwise; glibc only.

    Every epoch starts threads. By default glibc gives them up to eight arenas for each core, and
    the free pieces in each of them grow with the epochs.
    """
    if "MALLOC_ARENA_MAX" in os.environ:
        return
    # Other C libraries have no `mallopt`, or none that knows this option.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)
