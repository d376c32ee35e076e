"""An archive of the JVM's loaded classes, made once per machine, that lets every later driver start in less time.

A driver that replaces a killed one spends most of its gap loading and verifying some fifteen thousand classes of Spark.
Java's class data sharing keeps them in a file in the form the JVM has them in memory. The archive fits one Java and one
set of jars; the JVM itself checks that, and one that does not fit is ignored. `tidegate warm` makes it
(decision 0007 has the figures).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pyspark

__all__ = ["ARCHIVE_DUMP_VARIABLE", "locate_class_archive", "build_archive_options"]

#: Names the file an archive is written to when the JVM of this process ends; set by `tidegate warm` only.
ARCHIVE_DUMP_VARIABLE = "TIDEGATE_CLASS_ARCHIVE_DUMP"
_ARCHIVE_LOG_OPTIONS = "-Xlog:disable -Xlog:all=error:stderr"  # an archive that does not fit is worth no line in every log


def locate_class_archive(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the archive of this machine's Java and Spark belongs, whether or not it is there; None without a Java."""
    java = _find_java(environment)
    if java is None:
        return None
    known = java.stat()
    jars = environment.get("SPARK_HOME") or str(Path(pyspark.__file__).parent)
    parts = (str(java), known.st_size, known.st_mtime_ns, jars, pyspark.__version__)
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "tidegate", "jvm", hashlib.sha256(repr(parts).encode()).hexdigest()[:16] + ".jsa")


def build_archive_options(environment: Mapping[str, str] = os.environ) -> str:
    """Options of the driver's JVM that use the archive, or write it; empty when there is none."""
    target = environment.get(ARCHIVE_DUMP_VARIABLE)
    if target:
        return f'"-XX:ArchiveClassesAtExit={target}" {_ARCHIVE_LOG_OPTIONS}'
    archive = locate_class_archive(environment)
    return f'"-XX:SharedArchiveFile={archive}" -Xshare:auto {_ARCHIVE_LOG_OPTIONS}' if archive is not None and archive.is_file() else ""


def _find_java(environment: Mapping[str, str]) -> Path | None:
    home = environment.get("JAVA_HOME")
    found = str(Path(home, "bin", "java")) if home else shutil.which("java", path=environment.get("PATH"))
    return Path(found).resolve() if found and Path(found).exists() else None
