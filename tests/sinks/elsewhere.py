"""Work on rows as a task does it: what it is given and what it returns are pickled."""

from __future__ import annotations

import pickle
from typing import Any

from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import RowWork


def run_elsewhere(store: Store, work: RowWork) -> Any:
    """Do work on copies of what it is given, and return a copy of what it returns."""
    copy: RowWork = pickle.loads(pickle.dumps(work))
    return pickle.loads(pickle.dumps(copy(store)))
