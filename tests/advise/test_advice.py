"""The advisor's arithmetic, on small sketches and on a month of real flights."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from math import ceil, log

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.infra.flights import AIRPORTS, FlightsFeed
from tidegate.jobs.advise.lag_advice import (
    GAMMA,
    TARGET_SHARES,
    LagAdvice,
    LatenessCurve,
    advise_lags,
    bucket_upper_bound,
    merge_sketches,
)
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows.member_scan import MemberColumns, MemberScanner
from tidegate.jobs.spec.pipeline import PipelineSpec

SOURCE = {"path": "inbox", "schema": {"t": "timestamp"}, "event_time": "t", "lag": "30m"}
SPEC = PipelineSpec.model_validate({"name": "p", "sources": dict.fromkeys(AIRPORTS, SOURCE)})
HOUR = 3_600_000_000


def bucket_of(disorder: int) -> int:
    """The bucket of a row that is so many ticks behind, by the rule of `lag_advice`."""
    return 0 if disorder <= 0 else ceil(log(disorder) / log(GAMMA)) + 1


def exact_lag(disorder: pd.Series[int], share: Fraction) -> int:
    """The least lag that leaves at most this share late, from the rows themselves."""
    ordered = np.sort(disorder.to_numpy())
    return int(ordered[len(ordered) - int(share * len(ordered)) - 1])


@cache
def month() -> dict[str, pd.Series[int]]:
    """Airport -> event times in ticks in order of arrival."""
    times: dict[str, list[pa.Array]] = {}
    for item in FlightsFeed("2013-01-01", 31).objects():
        data = item.table.filter(pa.compute.equal(item.table["kind"], "data"))
        times.setdefault(item.airport, []).append(data["event_time"].cast(pa.int64()).to_numpy())
    return {airport: pd.Series(np.concatenate(times[airport])) for airport in AIRPORTS}


def disorder_of(times: pd.Series[int]) -> pd.Series[int]:
    """Per row, how far it is behind the newest row before it.

    Computed by pandas alone, without the code under test.
    """
    return (times.cummax().shift(fill_value=times.iloc[0]) - times).clip(lower=0)


@cache
def advised() -> dict[str, LagAdvice]:
    """The advice from sketches as the mover writes them, cut after cut."""
    epochs = []
    for airport, times in month().items():
        memory: dict[str, dict[str, object]] = {"members": {}}
        values: NDArray[np.int64] = np.asarray(times, dtype=np.int64)
        for begin in range(0, values.size, 997):
            part = values[begin : begin + 997]
            rows = MemberColumns(
                np.arange(part.size, dtype=np.int64),
                part,
                part + 1,
                np.zeros(part.size, dtype=np.int8),
            )
            found = MemberScanner(SPEC, Member(airport), rows, memory).scan()
            memory["members"][f"{airport}/0"] = {"generator": found.survey.punctuation_state}
            epochs.append({airport: {"gamma": GAMMA, "buckets": found.sketch}})
    return {
        found.source: found for found in advise_lags(epochs, dict.fromkeys(AIRPORTS, HOUR // 2), {})
    }


@pytest.mark.parametrize("airport", AIRPORTS)
def test_lags_of_real_flights_are_within_one_percent(airport: str) -> None:
    """For 1 %, 0.1 % and 0.01 % late the advised lag is that of the exact quantile, or at most 1 %
    more.
    """
    disorder = disorder_of(month()[airport])
    for target in advised()[airport].targets:
        exact = exact_lag(disorder, target.share)
        assert exact <= target.lag <= exact * 1.01


@pytest.mark.parametrize("airport", AIRPORTS)
def test_late_share_of_a_lag_is_that_of_a_lag_within_one_percent(airport: str) -> None:
    """What the present lag leaves late lies between the exact shares at this lag and at one 1 %
    shorter.
    """
    disorder, found = disorder_of(month()[airport]), advised()[airport]
    assert found.curve.rows == len(disorder)
    assert found.present_share is not None
    assert (
        (disorder > HOUR // 2).mean() <= found.present_share <= (disorder > HOUR // 2 / 1.01).mean()
    )


@given(st.integers(0, 2**62))
def test_a_bucket_holds_its_values_within_one_percent(disorder: int) -> None:
    """The bound of a value's bucket is not below it (a rounding apart) and at most 1 % above."""
    upper = bucket_upper_bound(bucket_of(disorder))
    assert disorder * (1 - 1e-12) <= upper <= disorder * 1.01 * (1 + 1e-12) + 1


@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=60),
    st.sampled_from([*TARGET_SHARES, Fraction(1, 2), Fraction(1, 3)]),
)
def test_lag_is_the_least_that_suffices(disorder: list[int], share: Fraction) -> None:
    """At the advised lag at most the wanted share is late.

    At one tick less it is more, unless no lag is needed.
    """
    counts: dict[int, int] = {}
    for value in disorder:
        counts[value] = counts.get(value, 0) + 1
    curve = LatenessCurve(counts)
    lag = curve.lag_for(share)
    assert lag is not None
    assert curve.late_rows_at(lag) <= share * len(disorder)
    assert lag == 0 or curve.late_rows_at(lag - 1) > share * len(disorder)
    # `lag: -1tick` is a valid setting, with which every row may be late.
    assert curve.late_rows_at(-1) == len(disorder)


def test_sketches_of_other_gammas_still_count() -> None:
    """Manifests written before the gamma changed add up with those written since."""
    old, new = (
        {"gamma": 1.02, "buckets": {"0": 5, "1": 2, "703": 1}},
        {"gamma": 1.01, "buckets": {"0": 1, "1": 1}},
    )
    rows = merge_sketches([old, new])
    assert (rows[0], rows[1], sum(rows.values())) == (6, 3, 10)
    assert rows[bucket_upper_bound(703, 1.02)] == 1


def test_curve_falls_from_no_lag_to_no_late_row() -> None:
    """The curve starts at lag 0 with all rows that are behind and ends with none."""
    assert LatenessCurve({0: 6, 10: 3, 50: 1}).points() == [(0, 0.4), (10, 0.1), (50, 0.0)]
    assert LatenessCurve({0: 6}).points() == [(0, 0.0)]
    assert LatenessCurve({}).lag_for(TARGET_SHARES[0]) is None


def test_cost_is_relative_to_the_present_lag() -> None:
    """A target says how much more or less delay it would be.

    Without a known lag it says nothing.
    """
    sketch = {"s": {"gamma": 1.01, "buckets": {"0": 99, str(bucket_of(HOUR)): 1}}}
    found, *_ = advise_lags([sketch], {"s": HOUR // 2}, {"s": {"read": 120, "late": 7}})
    assert (found.read, found.late, found.present_share) == (120, 7, 0.01)
    assert [target.more_delay for target in found.targets[:2]] == [
        -HOUR // 2,
        bucket_upper_bound(bucket_of(HOUR)) - HOUR // 2,
    ]
    unknown, *_ = advise_lags([sketch], {}, {})
    assert unknown.targets[0].more_delay is None
    silent, *_ = advise_lags([], {"s": HOUR}, {})
    assert (silent.targets, silent.present_share) == ((), None)
