"""Checks without Great Expectations: `fake_checks.py run SPEC --store URL` fails one expectation, as the real runner reports it."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

report = {
    "checks": [
        {"suite": "late", "id": "late_ratio", "success": False, "severity": "critical", "message": "0.7 of LGA came late"},
        {"suite": "late", "id": "reasons", "success": False, "severity": "warn", "message": "a new reason"},
        {"suite": "barriers", "id": "complete", "success": True, "severity": "critical", "message": ""},
    ],
    "docs": "s3://tidegate/checked/quality/index.html",
}
path = Path(tempfile.mkdtemp()) / "report.json"
path.write_text(json.dumps(report))
sys.stdout.write(f"one expectation failed\n{path}\n")
sys.exit(1)
