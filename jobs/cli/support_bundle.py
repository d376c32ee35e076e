"""`tidegate support-bundle`: what somebody who helps has to see, in one file, without rows and without secrets.

In it: versions, the spec, status, lease, requests of people, the newest manifests, storage by kind, the drivers' logs. Not in it:
rows of any table, and any secret: values of settings that look like one are masked by name, and every value that this process
knows to be secret is masked wherever it turns up, logs included.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tidegate.jobs.cli import context, output
from tidegate.jobs.cli.context import SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.checkpoints.log import SlotLog
    from tidegate.jobs.spec.pipeline import PipelineSpec

__all__ = ["Masker", "support_bundle"]

_MASK: Final = "***"
_SECRET_NAME: Final = re.compile(
    r"secret|password|passwd|login|token|credential|private|api_?key|access_?key|jaas|sasl|fernet", re.IGNORECASE
)
_OURS: Final = ("TIDEGATE_", "OTEL_", "OPENLINEAGE_", "AWS_", "AIRFLOW__", "SPARK_", "JAVA_")
_USERINFO: Final = re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)")
_PAIR: Final = re.compile(
    r"""(?i)(["']?[\w.\-]*(?:secret|password|passwd|token|credential|api_?key)[\w.\-]*["']?\s*[=:]\s*["']?)([^\s"',;}]+)"""
)
_SHORTEST: Final = 6  # a shorter value is masked by its name only: it may well be an ordinary word elsewhere
_MANIFESTS: Final = 20
_LOG_BYTES: Final = 2 << 20  # of each log, from its end
_LOGS: Final = 10
_PACKAGES: Final = ("pyspark", "apache-airflow", "pyiceberg", "pyarrow", "boto3", "duckdb", "great-expectations", "pydantic")


class Masker:
    """Takes secrets out of text.

    Args:
        environment: whose secret values are masked wherever they appear.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        known = {value for name, value in environment.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST}
        self._known = sorted(known, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Known secrets, passwords in addresses, and what stands behind a secret's name."""
        for secret in self._known:
            text = text.replace(secret, _MASK)
        return _PAIR.sub(rf"\g<1>{_MASK}", _USERINFO.sub(_MASK, text))

    def document(self, value: Any, name: str = "") -> Any:
        """JSON-ready data with every value under a secret's name masked, and every text looked through."""
        if isinstance(value, Mapping):
            return {key: self.document(item, str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.document(item, name) for item in value]
        if isinstance(value, str):
            return _MASK if _SECRET_NAME.search(name) and not value.startswith("env:") else self.text(value)
        return value


def support_bundle(
    pipeline: SpecArgument,
    store: StoreOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it. Default: <pipeline>-support.zip here.")
    ] = None,
) -> None:
    """Gather what a helper has to see in one zip file: no rows, no secrets. Look into it before you send it."""
    spec = context.find_spec(pipeline)
    log = context.open_log(spec.name, store)
    masker = Masker(os.environ)
    target = out or Path(f"{spec.name}-support.zip")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in _contents(spec, log, masker):
            bundle.writestr(name, text)
    target.write_bytes(buffer.getvalue())
    output.console().print(f"{target}: {output.size(len(buffer.getvalue()))}. No rows and no known secrets; look into it first.")


def _contents(spec: PipelineSpec, log: SlotLog, masker: Masker) -> Iterator[tuple[str, str]]:
    yield "versions.json", _json(_versions())
    yield "environment.json", _json(_environment(os.environ, masker))
    yield "spec.json", _json(masker.document(json.loads(spec.canonical())))
    layout = log.layout
    for key in (layout.status, layout.lease, layout.desired, layout.roots, layout.identity):
        yield from _document(log, key, masker)
    for prefix in (layout.requests, layout.acks):
        for entry in islice(log.store.list(prefix), 200):
            yield from _document(log, entry.key, masker)
    yield from _manifests(log, masker)
    yield from _logs(log, masker)


def _document(log: SlotLog, key: str, masker: Masker) -> Iterator[tuple[str, str]]:
    from tidegate.checkpoints.store import NotFoundError

    try:
        data = log.store.get(key).data
    except NotFoundError:
        return
    try:
        yield key, _json(masker.document(json.loads(data)))
    except ValueError:
        yield key, f"not JSON: {len(data)} bytes"


def _manifests(log: SlotLog, masker: Masker) -> Iterator[tuple[str, str]]:
    """The newest slots as they stand: cuts, decisions, counters, timings, names of files; no rows."""
    for filled in islice(log.iter_back(log.head().checkpoint), _MANIFESTS):
        record = filled.record
        yield f"slots/{record.slot:010d}.json", _json(masker.document(record.model_dump(mode="json")))


def _logs(log: SlotLog, masker: Masker) -> Iterator[tuple[str, str]]:
    newest = sorted(log.store.list(log.layout.logs), key=lambda entry: entry.modified or 0.0)[-_LOGS:]
    for entry in newest:
        start = max(0, entry.size - _LOG_BYTES)
        text = log.store.get_range(entry.key, start, entry.size - start).decode("utf-8", "replace")
        yield entry.key, masker.text(text)


def _versions() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    from tidegate import __version__

    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    system = {"system": platform.platform(), "machine": platform.machine(), "cores": os.cpu_count()}
    return {"tidegate": __version__, "python": sys.version, **system, "packages": {name: of(name) for name in _PACKAGES}}


def _environment(environment: Mapping[str, str], masker: Masker) -> dict[str, Any]:
    """Settings of tidegate and of what it runs on; of all other variables not even the names."""
    ours: Iterable[str] = sorted(name for name in environment if name.startswith(_OURS))
    return {name: masker.document(environment[name], name) for name in ours}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, default=str)
