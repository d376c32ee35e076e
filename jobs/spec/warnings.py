"""What a valid spec should perhaps say: nothing that stops a pipeline."""

from __future__ import annotations

from tidegate.jobs.spec.pipeline import PipelineSpec

__all__ = ["list_spec_warnings"]


def list_spec_warnings(spec: PipelineSpec) -> list[str]:
    """Warnings about a spec, a sentence each."""
    # Where punctuation or a capped wall clock alone moves the frontier, no single row can.
    exposed = [name for name, source in spec.sources.items() if source.lag is not None and source.max_jump is None]
    if not exposed:
        return []
    return [
        f"max_jump is off ({', '.join(exposed)}): one row with a time far ahead takes the frontier along, and all behind is late"
    ]
