"""A pipeline whose closed hours are announced."""

from __future__ import annotations

SPEC = """\
apiVersion: tidegate/v1
name: p
sources:
  one: {path: inbox/one, schema: {at: timestamp}, event_time: at, lag: 1m}
windows: {per_hour: {kind: tumbling, size: 1h, keys: [], aggregates: {n: count(*)}, lateness: 1h}}
supervision: {announce: 1h}
"""
