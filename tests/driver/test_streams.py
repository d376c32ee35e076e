"""What streams add to a driver.

A dispatcher when the spec has streams, and the documents of its splice requests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import Bench
from tests.oracle.mover import OracleMover
from tests.streams.support import streams_spec
from tidegate.errors import ConfigurationError
from tidegate.jobs.driver.pipeline_run import make_dispatcher, make_followers
from tidegate.jobs.streams.dispatcher import StreamDispatcher
from tidegate.jobs.streams.stream_state import SpliceRequestSink


def test_only_a_pipeline_with_streams_dispatches() -> None:
    """And a predicate that cannot be read stops the driver before the first epoch."""
    plain, bad = Bench(streams_spec()), {"p": {"from": "events", "to": "d", "where": "nowhere = 1"}}
    mover = OracleMover(plain.store, plain.spec)
    assert make_dispatcher(plain.spec, plain.store, plain.log, mover) is None
    good = streams_spec(streams={"d": {}}, pipes={"p": {"from": "events", "to": "d"}})
    assert isinstance(make_dispatcher(good, plain.store, plain.log, mover), StreamDispatcher)
    with pytest.raises(ConfigurationError, match="nowhere"):
        make_dispatcher(streams_spec(streams={"d": {}}, pipes=bad), plain.store, plain.log, mover)


@pytest.mark.parametrize(("merge", "expected"), [("concat", 0), ("splice", 1)])
def test_splices_have_a_follower_that_writes_their_documents(
    tmp_path: Path, merge: str, expected: int
) -> None:
    """Beside the sinks, and only where there can be a request."""
    spec = streams_spec(
        streams={"d": {}}, pipes={"p": {"from": "events", "to": "d", "merge": merge}}
    )
    found = make_followers(spec, Bench(spec).store, "0" * 32)
    assert sum(isinstance(sink, SpliceRequestSink) for sink in found) == expected
