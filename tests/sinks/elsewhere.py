"""Work on rows as a task does it: what it is given and what it returns are pickled."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import RowWork


def run_elsewhere(store: Store, works: Sequence[RowWork]) -> list[Any]:
    """Do work on copies of what it is given, and return copies of what it returns."""
    copies = [pickle.loads(pickle.dumps(work)) for work in works]
    return [pickle.loads(pickle.dumps(work(store))) for work in copies]
