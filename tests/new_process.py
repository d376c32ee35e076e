"""Calls of functions in a new process, where nothing of other tests runs or is held."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def call_in_new_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what the function returns there; its module is imported again.

    Who traces memory needs this. The tracer slows down all of a process, counts what its other
    threads allocate, and may not be stopped: Python 3.11 then frees its tables under threads of
    libraries and crashes.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()
