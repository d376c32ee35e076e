"""What an engine does not do, refused before it reads a row."""

from __future__ import annotations

from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.jobs.spec.pipeline import PipelineSpec

__all__ = ["refuse_on_spark"]


def refuse_on_spark(spec: PipelineSpec) -> None:
    """The Spark mover, which runs every pipeline, does not do edge events.

    Raises:
        ConfigurationError: a source has them.
    """
    named = [name for name, source in spec.sources.items() if source.edges is not None]
    if named:
        raise ConfigurationError(
            f"sources.{named[0]}.edges: the Spark mover does not do edge events; only the reference model and mover do",
            code="spec.edges_on_spark",
            pipeline=spec.name,
            kept="nothing was started or changed",
            advice="let one row carry start and end (end_time), or leave 'edges' out and treat both as ordinary rows",
        )
