"""The spec of a job: a PySpark streaming script of your own, in a YAML file with ``kind: job``."""

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tidegate.time_units import PositiveDuration

from .event_time_options import SpecModel
from .operations import CheckpointSpec, QualitySpec, SupervisionSpec
from .pipeline import API_VERSION, PipelineSpec
from .source_spec import Name

_QUERY_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}"
QueryName = Annotated[str, Field(pattern=rf"^{_QUERY_NAME}$")]


def _validate_app(value: str) -> str:
    if not value.endswith(".py"):
        raise ValueError(
            "a job runs a PySpark script (.py), and cannot seal the queries of a program in Scala"
            " or Java"
        )
    return value


def is_query_name(text: str) -> bool:
    """Return whether a query of this name can be sealed: its name is a part of keys.

    It has 1 to 100 letters, digits, `_` and `-`, and begins with a letter or digit.
    """
    return re.fullmatch(_QUERY_NAME, text) is not None


def _write_scalar(value: object) -> object:
    """Write a switch or a number of YAML as text; other values are judged by the field."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


Text = Annotated[str, BeforeValidator(_write_scalar)]
"""A text that YAML may write as a number or a switch."""


class JobCheckpointSpec(CheckpointSpec):
    """What happens to sealed batches, and where Spark keeps its checkpoints."""

    location: Literal["host", "bucket"] = "host"
    """Where a launch keeps Spark's checkpoints: in a folder of the driver's host, or in the store's
    bucket, which also executors on other hosts reach. ``bucket`` needs a store in S3.
    """


class JobSpec(SpecModel):
    """One job: the script stays as it is, and Spark's own rules of event time apply."""

    api_version: Literal["tidegate/v1"] = Field(default=API_VERSION, alias="apiVersion")
    """Version of this format."""
    kind: Literal["job"]
    """Tells a job from a pipeline."""
    name: Name
    """Name of the job; it prefixes keys and DAG ids."""
    description: str = ""
    """Free text for people."""
    app: Annotated[str, AfterValidator(_validate_app)]
    """The PySpark script, relative to the working folder or to the folder of this file."""
    args: tuple[Text, ...] = ()
    """Arguments of the script. One that is ``env:NAME`` is read from the environment."""
    queries: tuple[QueryName, ...] = ()
    """Names of the streaming queries to seal. Empty: all that the script starts."""
    repeatable: tuple[QueryName, ...] = ()
    """Queries whose sink may get a batch twice without harm, for example by upserts.

    A restore leaves their sinks as they are.
    """
    start_within: PositiveDuration = 900_000_000
    """The script has this long to start the queries. Then the job ends as stalled."""
    batch_within: PositiveDuration = 3_600_000_000
    """A query may work this long without a batch that ends; then the job ends as stalled.

    A trigger that finds nothing to do counts as such an end.
    """
    may_end: bool = False
    """Whether the script may end a query that has no end of its own, or Spark, and the job is then
    finished. Otherwise such an end is a failure.
    """
    conf: dict[str, Text] = {}
    """Spark settings that replace those of the script.

    A value ``env:NAME`` is read from the driver's environment.
    """
    checkpoint: JobCheckpointSpec = JobCheckpointSpec()
    """Retention of sealed batches. The pace of batches stays that of the script's triggers."""
    supervision: SupervisionSpec = SupervisionSpec()
    """What Airflow does with the job."""
    quality: QualitySpec = QualitySpec()
    """What the quality checks compare with; `recent` counts the newest batches of each query."""

    def _list_problems(self) -> Iterator[str]:
        if len(set(self.queries)) < len(self.queries):
            yield "queries: a name is given twice"
        strange = sorted(set(self.repeatable) - set(self.queries)) if self.queries else []
        if strange:
            yield f"repeatable: {', '.join(strange)} is not one of the queries"
        if self.supervision.submit is not None and "spark.master" in self.conf:
            yield "conf: spark.master is that of the connection which supervision.submit names"

    def seals(self, query: str) -> bool:
        """Return whether the batches of this query are sealed."""
        return not self.queries or query in self.queries

    def digest(self, script: bytes) -> str:
        """Return the SHA-256, in hex, of the script and of name, `args`, `queries` and `conf`."""
        given = json.dumps([self.name, self.args, self.queries, self.conf], sort_keys=True)
        return hashlib.sha256(given.encode() + b"\n" + script).hexdigest()


SupervisedSpec = PipelineSpec | JobSpec
"""What has a log and a lease, and is supervised by Airflow."""
