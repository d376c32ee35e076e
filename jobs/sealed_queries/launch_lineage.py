"""OpenLineage events of jobs: one run per launch, with what each query reads and writes.

The run is started with the launch, runs with each sealed batch, and completes or fails with the
launch. Datasets are named by OpenLineage's rules where Spark's description says enough: files and
topics. Others have the namespace ``spark`` and Spark's description as their name.
"""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

from tidegate.checkpoints.batch_notes import BatchNotes
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.manifest import Manifest
from tidegate.errors import TidegateError
from tidegate.jobs.driver.epoch_listeners import (
    PRODUCER,
    DatasetName,
    OpenLineageSender,
    make_failure_event,
    make_lineage_event,
    name_folder_dataset,
)

if TYPE_CHECKING:
    from openlineage.client.event_v2 import RunEvent

_TOPICS = re.compile(r"Kafka\w*\[Subscribe\[(.+)\]\]")
_PLACE = re.compile(r"\w+\[((?:/|\w+:/).*)\]|(\w+://.*)")
_OBJECT_HASH = re.compile(r"@[0-9a-f]+")  # Java's, another one in each launch


class LaunchLineage:
    """Sends the run of one launch.

    Args:
        sender: sends it.
        job: name of the job.
        uid: its identity.
        token: of the launch's lease. The run has the same id whenever it is sent.
    """

    def __init__(self, sender: OpenLineageSender, job: str, uid: str, token: int) -> None:
        self._sender = sender
        run = str(uuid.uuid5(uuid.NAMESPACE_URL, f"tidegate:{uid}:launch {token}"))
        self._own = (run, sender.namespace, job)
        self._send_state("START")

    def record_batch(self, manifest: Manifest) -> None:
        """Send the datasets of the query whose batch was sealed, with the rows of each source."""
        from openlineage.client.event_v2 import InputDataset, OutputDataset
        from openlineage.client.facet_v2 import InputDatasetFacet
        from openlineage.client.facet_v2 import input_statistics_input_dataset as statistics

        notes = BatchNotes.from_manifest(manifest)
        if notes is None:
            return
        at = notes.queries[notes.query]

        def make_events() -> list[RunEvent]:
            """Return the event of the batch."""
            event = make_lineage_event("RUNNING", manifest.created_at, *self._own)
            event.inputs = []
            for source in at.sources:
                names, facets = name_datasets(source.name), dict[str, InputDatasetFacet]()
                if len(names) == 1:  # Spark counts the rows of all topics of a source together
                    facets["inputStatistics"] = statistics.InputStatisticsInputDatasetFacet(
                        source.rows, producer=PRODUCER
                    )
                event.inputs += [InputDataset(*name, inputFacets=facets) for name in names]
            event.outputs = [OutputDataset(*name) for name in name_datasets(at.sink)]
            return [event]

        self._sender.send(make_events)

    def end(self, error: TidegateError | None) -> None:
        """Send how the launch has ended; also a stop completes it."""
        if error is None:
            self._send_state("COMPLETE")
        else:
            now = SYSTEM_CLOCK.wall_ticks()
            self._sender.send(lambda: [make_failure_event(error, now, *self._own)])

    def _send_state(self, kind: str) -> None:
        now = SYSTEM_CLOCK.wall_ticks()
        self._sender.send(lambda: [make_lineage_event(kind, now, *self._own)])


def name_datasets(description: str) -> list[DatasetName]:
    """Return namespace and name of what Spark's description of a source or sink names.

    The address of a topic, which tidegate writes for a Kafka sink, is a description as well.

    >>> name_datasets("FileStreamSource[file:/data/in]")
    [('file', '/data/in')]
    >>> name_datasets("DeltaSink[s3a://lake/out]")
    [('s3://lake', 'out')]
    >>> name_datasets("kafka://broker:9092/orders")
    [('kafka://broker:9092', 'orders')]
    >>> name_datasets("KafkaV2[Subscribe[a, b]]")
    [('kafka', 'a'), ('kafka', 'b')]
    >>> name_datasets("ForeachBatchSink")
    [('spark', 'ForeachBatchSink')]
    """
    if topics := _TOPICS.fullmatch(description):
        return [("kafka", topic.strip()) for topic in topics[1].split(",")]
    if place := _PLACE.fullmatch(description):
        return [name_folder_dataset((place[1] or place[2]).replace("s3a://", "s3://"))]
    return [("spark", _OBJECT_HASH.sub("", description))]
