"""What YARN and Kubernetes are asked for: memory for Python workers, and new executors.

They end a container that uses more than it asked for, with all tasks in it. Spark asks for a share
of the JVM's memory besides, which knows nothing of Python workers.
"""

import re
from collections.abc import Mapping
from typing import Final

WORKER_MEGABYTES: Final = 600
"""What a Python worker may need; one task at a time runs in it.

`tidegate size` shows the most that a pipeline's own workers have held.
"""
_LEAST_MEGABYTES: Final = 384
"""What Spark asks for besides the memory of an executor's JVM, if a tenth of that is less."""
_HEAP: Final = "spark.executor.memory"
_OVERHEAD: Final = "spark.executor.memoryOverhead"
_OFF_HEAP: Final = "spark.memory.offHeap.size"
_OF_CONTAINER: Final = {_HEAP: "1g", "spark.executor.pyspark.memory": "0"}
"""What a container has besides the overhead, and how much by default."""
_FAILURES: Final = "spark.executor.maxNumFailures"
_FAILURES_KEPT: Final = "spark.executor.failuresValidityInterval"
_OLDER_NAMES: Final = {
    _FAILURES: "spark.yarn.max.executor.failures",
    _FAILURES_KEPT: "spark.yarn.executor.failuresValidityInterval",
}
_TRIES: Final = 12
"""Executors that one task ends before tidegate names it: three jobs, each with four tries."""
_MEMORY: Final = re.compile(r"(\d+)\s*([kmgt]?)b?")
_BYTES: Final = {"k": 1 << 10, "": 1 << 20, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
"""By unit; a number alone means mebibytes, as for Spark."""


def build_container_settings(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that executors in containers need and that `conf` does not have.

    They make room for Python workers, one for each core of an executor. Spark counts lost executors
    from the start of a driver and ends it after twice as many as it asked for, at least three. That
    is counted by the hour, so that a driver lives for months, and up to what the driver's own count
    needs (`LostWorkers`). Empty for other masters.

    Args:
        master: of Spark.
        conf: the settings that are given.

    >>> conf = {"spark.executor.memory": "8g", "spark.executor.cores": "4"}
    >>> build_container_settings("yarn", conf)["spark.executor.memoryOverhead"]
    '3219m'
    >>> build_container_settings("spark://host:7077", conf)
    {}
    """
    if not (master == "yarn" or master.startswith("k8s://")):
        return {}
    wanted = conf.get("spark.executor.instances", "2")
    if conf.get("spark.dynamicAllocation.enabled") == "true":
        wanted = conf.get("spark.dynamicAllocation.maxExecutors", "")  # without, Spark has no bound
    failures = {_FAILURES_KEPT: "1h"}
    if wanted.isdecimal():  # Spark says itself what it cannot read
        failures[_FAILURES] = str(_TRIES * (int(wanted) + 1))
    settings = {**_build_memory_settings(conf), **failures}
    given = {name for name in settings if name in conf or _OLDER_NAMES.get(name) in conf}
    return {name: value for name, value in settings.items() if name not in given}


def count_container_bytes(conf: Mapping[str, str]) -> int | None:
    """Return the memory of a container of YARN with these settings; None if that is not known.

    >>> count_container_bytes({"spark.executor.memoryOverhead": "984m"}) >> 20
    2008
    """
    sizes = [_read_megabytes(conf.get(name, size)) for name, size in _OF_CONTAINER.items()]
    if conf.get("spark.memory.offHeap.enabled") == "true":
        size = conf.get(_OFF_HEAP, "0")
        sizes.append(_read_megabytes(f"{int(size) >> 20}m" if size.isdecimal() else size))
    heap, overhead = sizes[0], _read_megabytes(conf.get(_OVERHEAD, ""))
    if heap is not None and overhead is None and _OVERHEAD not in conf:
        factor = float(conf.get(f"{_OVERHEAD}Factor", "0.1"))
        overhead = max(_LEAST_MEGABYTES, int(factor * heap))
    known = [size for size in (*sizes, overhead) if size is not None]
    return sum(known) << 20 if len(known) == len(sizes) + 1 else None


def _read_megabytes(text: str) -> int | None:
    found = _MEMORY.fullmatch(text.lower())
    return None if found is None else int(found[1]) * _BYTES[found[2]] >> 20


def _build_memory_settings(conf: Mapping[str, str]) -> dict[str, str]:
    if f"{_OVERHEAD}Factor" in conf:
        return {}
    megabytes = _read_megabytes(conf.get(_HEAP, "1g"))
    cores = conf.get("spark.executor.cores", "1")
    # Spark says itself what it cannot read.
    if _OVERHEAD in conf or megabytes is None or not cores.isdecimal():
        return {}
    overhead = max(_LEAST_MEGABYTES, megabytes // 10) + int(cores) * WORKER_MEGABYTES
    return {_OVERHEAD: f"{overhead}m"}
