"""`tidegate support-bundle`: collects in one file what a helper needs, without rows and secrets.

It contains versions, the spec, status, lease, requests of people, the newest manifests, storage by
kind and the drivers' logs. It contains no rows of any table. Secrets are masked: the values of
settings whose name looks like a secret, every value that this process knows to be secret wherever
it appears, and in logs what follows a secret's name, is in a header, or is part of an address
that is signed or holds a password.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import sys
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, quote_plus, unquote

import typer

from tidegate.errors import TidegateError
from tidegate.json_types import JsonObject
from tidegate.secret_masks import MASK, SECRET_WORDS, mask_text

from . import arguments, output
from .arguments import SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.jobs.spec.pipeline import PipelineSpec

# In a bundle also names that only describe a secret, such as `sasl.mechanism`: it is sent away.
_SECRET_NAME = re.compile(rf"{SECRET_WORDS}|private|sasl", re.IGNORECASE)
# Other variables of the host are private.
_SETTING_PREFIXES = (
    "TIDEGATE_",
    "OTEL_",
    "OPENLINEAGE_",
    "AWS_",
    "AIRFLOW__",
    "SPARK_",
    "JAVA_",
)
# Also in JSON inside of JSON, with its backslashes.
_NAMED_SECRET = re.compile(
    rf"""({SECRET_WORDS}[\w.\-]*"""
    r"""(?:[\\"'\s+]*(?:[=:]|\\+u003[AD])|\\*["'][\\"'\s+]*,)).+""",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"""(:\\*/\\*/)(?:[^\s":/@]*:[^\s"]*|[^\s"/@]+)@""")
_BEARER = re.compile(r"(bearer[\s+]+)\S+", re.IGNORECASE)
_WORD = re.compile(r"\S+")
_ENVIRONMENT_REFERENCE = re.compile(r'"env:([^"]+)"')
_ENCODERS: tuple[Callable[[str], str], ...] = (
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: repr(text)[1:-1],
    lambda text: repr('"' + text)[2:-1],  # in what holds a double quote as well
    quote,
    lambda text: quote(text, safe=""),
    quote_plus,
)
_ENCODING_DEPTH = 3  # encodings inside of each other: an address in JSON in a line of JSON
_SHORTEST_SECRET = (
    6  # a shorter value is masked by its name only: it may well be an ordinary word elsewhere
)
# Enough epochs to see how a pipeline got where it is, and small enough to send by mail.
_MANIFEST_LIMIT = 20
_LOG_BYTES = 2 << 20  # of each log, from its end
_LOG_LIMIT = 10


class SecretMasker:
    """Masks secrets in text; in doubt it masks too much.

    These are values of variables, private keys, passwords in addresses, bearer tokens, and what
    follows a secret's name.

    Args:
        environment: values of its secret variables are masked wherever they appear, however they
            are encoded, if they have at least 6 characters.
        named: further variables that hold secrets: those that a spec names as `env:NAME`.
    """

    def __init__(self, environment: Mapping[str, str], named: Collection[str] = ()) -> None:
        secret = (
            value
            for name, value in environment.items()
            if name in named or _SECRET_NAME.search(name)
        )
        known = {
            form
            for value in secret
            if len(value) >= _SHORTEST_SECRET
            for form in _encode_secret(value)
        }
        # Longest first: a secret may contain another one, whose mask would leave its rest readable.
        self._known = sorted(known, key=len, reverse=True)

    def mask_text(self, text: str) -> str:
        """Mask known secrets, private keys, passwords in addresses, bearer tokens, named secrets.

        A named secret reaches from its name to the end of the line; in a line of JSON, see
        `mask_document`.
        """
        # Known values first, wherever they are: the rules below only see names and addresses.
        for secret in self._known:
            text = text.replace(secret, MASK)
        return "\n".join(map(self._mask_line, mask_text(text).split("\n")))

    def mask_document(self, value: Any, name: str = "") -> Any:
        """Mask every text under a secret's name, and search all other texts for secrets.

        The text `env:NAME` and numbers stay as they are.
        """
        secret = _SECRET_NAME.search(name)
        if isinstance(value, Mapping):
            return {
                self.mask_text(str(key)): self.mask_document(item, name if secret else str(key))
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mask_document(item, name) for item in value]
        if isinstance(value, str):
            # `env:NAME` is the name of a variable, which helps, and not its value.
            return MASK if secret and not value.startswith("env:") else self.mask_text(value)
        return value

    def _mask_line(self, line: str) -> str:
        """Within JSON the names and the ends of values are known.

        In any other line only where a secret begins.
        """
        # Driver logs are JSON lines; a broken one is masked as plain text.
        if line.lstrip()[:1] in ("{", "["):
            with suppress(ValueError, RecursionError):
                return json.dumps(self.mask_document(json.loads(line)))
        masked = _BEARER.sub(
            rf"\1{MASK}", _NAMED_SECRET.sub(rf"\1{MASK}", _USERINFO.sub(rf"\1{MASK}@", line))
        )
        return _WORD.sub(self._mask_encoded_word, masked) if "%" in masked else masked

    def _mask_encoded_word(self, found: re.Match[str]) -> str:
        """A word: as it is, unless it is an encoded address with something to mask in it."""
        plain = unquote(found[0])
        masked = plain if plain == found[0] else self.mask_text(plain)
        return found[0] if masked == plain else masked


def _encode_secret(secret: str) -> set[str]:
    """A secret as JSON, an address, or JSON inside of JSON may encode it."""
    found = {secret}
    for _ in range(_ENCODING_DEPTH):
        found |= {encode(form) for form in found for encode in _ENCODERS}
    return found


def write_support_bundle(
    pipeline: SpecArgument,
    store: StoreOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where to write it. Default: <pipeline>-support.zip here."
        ),
    ] = None,
) -> None:
    """Collect what a helper needs in one zip file, without rows and secrets.

    A file of that name is replaced. Look into it before you send it.
    """
    from rich.filesize import decimal

    spec, log = arguments.open_spec_and_log(pipeline, store)
    masker = SecretMasker(os.environ, _ENVIRONMENT_REFERENCE.findall(spec.canonical_json()))
    target = out or Path(f"{spec.name}-support.zip")
    # In memory, so that a failure leaves no half file that a person may send.
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in _collect_contents(spec, log, masker):
            bundle.writestr(name, text)
    target.write_bytes(buffer.getvalue())
    output.console().print(
        f"{target}: {decimal(len(buffer.getvalue()))}. No rows and no known secrets;"
        " look into it first."
    )


def _collect_contents(
    spec: PipelineSpec, log: SlotLog, masker: SecretMasker
) -> Iterator[tuple[str, str]]:
    from tidegate.checkpoints.store import NotFoundError
    from tidegate.jobs.spec.spec_masks import mask_secrets

    from .status_and_logs import describe_pipeline

    yield "versions.json", _dump_json(_collect_versions())
    # Settings of tidegate and of what it runs on; of all other variables not even the names.
    ours = [name for name in sorted(os.environ) if name.startswith(_SETTING_PREFIXES)]
    settings = {name: masker.mask_document(os.environ[name], name) for name in ours}
    yield "environment.json", _dump_json(settings)
    yield (
        "spec.json",
        _dump_json(masker.mask_document(json.loads(mask_secrets(spec).canonical_json()))),
    )
    # If a document is malformed there is no overview, but the document itself is in the bundle.
    with suppress(TidegateError):
        yield "overview.json", _dump_json(masker.mask_document(describe_pipeline(log)))
    layout = log.layout
    keys = [layout.status_key, layout.lease_key, layout.desired_key, layout.roots_key]
    keys.append(layout.identity_key)
    for prefix in (layout.requests_prefix, layout.acks_prefix):
        # A stuck pipeline can pile up requests; the first ones show why.
        keys += [entry.key for entry in islice(log.store.list_objects(prefix), 200)]
    for key in keys:
        try:
            data = log.store.get(key).data
        except NotFoundError:
            continue
        try:
            yield key, _dump_json(masker.mask_document(json.loads(data)))
        except ValueError:
            yield key, f"not JSON: {len(data)} bytes"
    # The newest slots: cuts, decisions, counters, timings, names of files; no rows.
    for filled in islice(log.iterate_ancestors(log.head().checkpoint), _MANIFEST_LIMIT):
        slot = masker.mask_document(filled.record.model_dump(mode="json"))
        yield f"slots/{filled.record.slot:010d}.json", _dump_json(slot)
    yield from _collect_logs(log, masker)


def _collect_logs(log: SlotLog, masker: SecretMasker) -> Iterator[tuple[str, str]]:
    newest = sorted(
        log.store.list_objects(log.layout.logs_prefix), key=lambda entry: entry.modified or 0.0
    )[-_LOG_LIMIT:]
    for entry in newest:
        # The end of a log tells why a driver stopped.
        start = max(0, entry.size - _LOG_BYTES)
        text = log.store.get_range(entry.key, start, entry.size - start).decode("utf-8", "replace")
        yield entry.key, masker.mask_text(text)


def _collect_versions() -> JsonObject:
    from importlib.metadata import distributions

    from tidegate import __version__

    # Python imports the first one of a name. A broken installation leaves folders without a name:
    # None, or an error where the package importlib_metadata has been imported.
    packages: dict[str, str | None] = {}
    for one in distributions():
        with suppress(FileNotFoundError):
            if one.metadata["Name"]:
                packages.setdefault(one.metadata["Name"], one.version)
    return {
        "tidegate": __version__,
        "python": sys.version,
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "packages": packages,
    }


def _dump_json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, default=str)
