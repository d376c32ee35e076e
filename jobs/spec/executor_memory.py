"""The memory that YARN and Kubernetes set aside for the Python workers of an executor.

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
_OVERHEAD: Final = "spark.executor.memoryOverhead"
_MEMORY: Final = re.compile(r"(\d+)\s*([kmgt]?)b?")
_BYTES: Final = {"k": 1 << 10, "": 1 << 20, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
"""By unit; a number alone means mebibytes, as for Spark."""


def build_memory_settings(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Return the setting that makes room for Python workers, one for each core of an executor.

    Empty for other masters, and where the settings say how much is to be added.

    Args:
        master: of Spark.
        conf: the settings that are given.

    >>> conf = {"spark.executor.memory": "8g", "spark.executor.cores": "4"}
    >>> build_memory_settings("yarn", conf)
    {'spark.executor.memoryOverhead': '3219m'}
    >>> build_memory_settings("spark://host:7077", conf)
    {}
    """
    if not (master == "yarn" or master.startswith("k8s://")) or f"{_OVERHEAD}Factor" in conf:
        return {}
    found = _MEMORY.fullmatch(conf.get("spark.executor.memory", "1g").lower())
    cores = conf.get("spark.executor.cores", "1")
    # Spark says itself what it cannot read.
    if _OVERHEAD in conf or found is None or not cores.isdecimal():
        return {}
    megabytes = int(found[1]) * _BYTES[found[2]] >> 20
    overhead = max(_LEAST_MEGABYTES, megabytes // 10) + int(cores) * WORKER_MEGABYTES
    return {_OVERHEAD: f"{overhead}m"}
