"""Checks without Great Expectations.

`SPEC --store URL` fails one expectation and reports as the real runner does.
"""

from __future__ import annotations

import json
import sys

from tidegate.checkpoints.open_store import open_store
from tidegate.jobs.spec.loader import load_spec

_, spec, _, url = sys.argv
pipeline = load_spec(spec).name
late = {
    "suite": "late",
    "id": "late_ratio",
    "severity": "critical",
    "says": "few rows are late",
    "observed": "0.7 of LGA",
}
reasons = {
    "suite": "late",
    "id": "reasons",
    "severity": "warn",
    "says": "known reasons",
    "observed": "a new one",
}
key, docs = f"{pipeline}/quality/results/1.json", f"{pipeline}/quality/docs/1/index.html"
result = {"verdict": "fail", "failed": [late, reasons], "docs": docs, "key": key}
store = open_store(url)
store.put(key, json.dumps(result).encode())
store.put(docs, b"<h1>Data Docs</h1>")
sys.stdout.write(f"late.late_ratio failed\n{key}\n")
sys.exit(1)
