"""Makes the followers of a pipeline: the Iceberg tables, then the sinks of its spec."""

from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import Sink, WorkRunner
from tidegate.jobs.spec.operations import KafkaSinkSpec
from tidegate.jobs.spec.pipeline import PipelineSpec

from .base_follower import SlotFollower
from .files_webhook import FilesSink, WebhookSink
from .iceberg_sink import IcebergSink
from .kafka_sink import ExactlyOnceKafkaSink, KafkaSink
from .postgres_sink import PostgresSink

_SINKS: dict[str, type[SlotFollower]] = {
    "postgres": PostgresSink,
    "files": FilesSink,
    "kafka": KafkaSink,
    "webhook": WebhookSink,
}


def make_sinks(
    spec: PipelineSpec, store: Store, uid: str, run: WorkRunner | None = None
) -> list[Sink]:
    """Return every follower of a pipeline, without opening a connection.

    The Iceberg tables come first, because another sink may have to be filled from them.

    Args:
        spec: the pipeline.
        store: its store.
        uid: of the pipeline.
        run: moves the rows; unless given, this process does.

    Raises:
        ConfigurationError: the path of a files sink names a variable that is not set, or cannot be
            used.
    """
    sinks: list[Sink] = [IcebergSink(spec, store, uid, run)]
    for name, given in spec.sinks.items():
        kind = _SINKS[given.kind]
        if isinstance(given, KafkaSinkSpec) and given.delivery == "exactly_once":
            kind = ExactlyOnceKafkaSink
        sinks.append(kind(name, given, spec, store, uid, run))
    return sinks
