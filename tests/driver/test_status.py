"""What the driver says about its sources in the status."""

from __future__ import annotations

from tests.engine.harness import SECOND, Bench, row, spec_of
from tidegate.jobs.driver.status_reporter import find_silent_sources


def test_a_source_that_says_nothing_is_named() -> None:
    """From the limit on, with for how long, on the pipeline clock.

    Not before, not without a limit, not once it is done.
    """
    bench = Bench(spec_of(supervision={"silent_after": "20s"}))
    limit = bench.spec.supervision.silent_after
    engine = bench.engine()
    quiet, loud = sorted(bench.sources)
    for source in bench.sources.values():
        source.append(row(1))
    silent = [find_silent_sources(engine.run_epoch().decision, limit)]
    for number in range(4):
        bench.clock.advance(9)
        bench.sources[loud].append(row(2 + number))
        decision = engine.run_epoch().decision
        silent.append(find_silent_sources(decision, limit))
    assert silent == [{}, {}, {}, {quiet: 27 * SECOND}, {quiet: 36 * SECOND}]
    assert find_silent_sources(decision, None) == {}
    bench.sources[quiet].end()
    assert find_silent_sources(engine.run_epoch().decision, limit) == {}
