"""Breadth-first search through every state of a small model.

A sleep forever is a crash, so crashes need no extra steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class Explored:
    """How many states were seen, and the first violation (None: there is none)."""

    states: int
    violation: str | None


def explore(
    start: S,
    successors: Callable[[S], Iterable[S]],
    wrong_state: Callable[[S], str | None],
    wrong_step: Callable[[S, S], str | None],
) -> Explored:
    """Visit every state reachable from `start`, judging each state and each step."""
    seen, queue = {start}, deque([start])
    while queue:
        state = queue.popleft()
        violation = wrong_state(state)
        if violation:
            return Explored(len(seen), violation)
        for after in successors(state):
            violation = wrong_step(state, after)
            if violation:
                return Explored(len(seen), violation)
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return Explored(len(seen), None)
