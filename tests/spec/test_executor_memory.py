"""Memory for Python workers, where a container has a limit."""

from __future__ import annotations

import pytest

from tidegate.jobs.spec.executor_memory import build_container_settings

OVERHEAD = "spark.executor.memoryOverhead"
FAILURES = "spark.executor.maxNumFailures"
KEPT = "spark.executor.failuresValidityInterval"
DYNAMIC = {"spark.dynamicAllocation.enabled": "true"}


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({}, "984m"),
        ({"spark.executor.memory": "512m"}, "984m"),
        ({"spark.executor.memory": "2048"}, "984m"),
        ({"spark.executor.memory": "20GB", "spark.executor.cores": "8"}, "6848m"),
        ({OVERHEAD: "1g"}, None),
        ({f"{OVERHEAD}Factor": "0.5"}, None),
        ({"spark.executor.memory": "much"}, None),
        ({"spark.executor.cores": "few"}, None),
    ],
)
@pytest.mark.parametrize("master", ["yarn", "k8s://https://host:6443"])
def test_room_for_a_worker_on_each_core(
    master: str, conf: dict[str, str], expected: str | None
) -> None:
    """Beside what Spark itself asks for; what the settings say goes first."""
    found = build_container_settings(master, conf)
    assert found.get(OVERHEAD) == expected


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({}, ("36", "1h")),
        ({"spark.executor.instances": "4"}, ("60", "1h")),
        ({**DYNAMIC, "spark.dynamicAllocation.maxExecutors": "9"}, ("120", "1h")),
        (DYNAMIC, (None, "1h")),  # as many as there are: Spark counts none
        ({FAILURES: "5", KEPT: "1d"}, (None, None)),
        ({"spark.yarn.max.executor.failures": "5"}, (None, "1h")),
    ],
)
def test_a_driver_outlives_executors_that_are_lost_now_and_then(
    conf: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    """Spark would end it after three of them in its whole life; what the settings say goes first."""
    found = build_container_settings("yarn", conf)
    assert (found.get(FAILURES), found.get(KEPT)) == expected


@pytest.mark.parametrize("master", ["local[2]", "spark://host:7077", "sc://host"])
def test_no_container_no_setting(master: str) -> None:
    """Standalone workers have no limit for Python."""
    assert build_container_settings(master, {}) == {}
