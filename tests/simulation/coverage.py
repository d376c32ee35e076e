"""Which faults are possible at which step of the protocol, and which of them were injected.

The table of a soak.

A step is known by who asks, what for, and which key. What may go wrong there follows from the sorts
of requests it makes; a cell that no sort of request allows is impossible, with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache

ASK, LIST, SWAP, PUT, LOAD, COMMIT, POINT, DISK, INNER, SERVE = (
    "ask",
    "list",
    "swap",
    "put",
    "load",
    "commit",
    "point",
    "disk",
    "inner",
    "serve",
)
_PROCESS = ("crash", "sleep", "clock jump")
_ANY_REQUEST = (*_PROCESS, "503", "slow")
_ANY_WRITE = (*_ANY_REQUEST, "slow answer", "crash after", "lost request", "lost answer", "late")

KINDS: Mapping[str, tuple[str, ...]] = {
    ASK: (*_ANY_REQUEST, "denied"),
    LIST: (*_ANY_REQUEST, "denied", "torn list"),
    SWAP: (*_ANY_WRITE, "500", "twice", "409", "retried", "denied"),
    PUT: (*_ANY_WRITE, "500", "twice", "denied"),
    LOAD: _ANY_REQUEST,
    COMMIT: _ANY_WRITE,
    SERVE: _ANY_WRITE,
    POINT: _PROCESS,
    DISK: (*_PROCESS, "full disk", "slow disk"),
    INNER: ("defect",),
}
"""Sort of request -> what may happen to it.

- denied: 400 or 403, for a while: keys that have expired, a policy that is rolled out.
- torn list: a listing fails after a part of a page.
- full disk, slow disk: of the driver's scratch.
- defect: an exception that no code expects, in a thread whose work can wait.
- twice, retried: a proxy or the client library repeats a request by itself, later or at once.
- clock jump: the wall clock of a host goes on or back by hours.
"""

BACKGROUND = ("housekeeping", "status")
"""Roles of the threads in which a defect may happen."""

_COLUMNS = (
    *("crash", "crash after", "sleep", "clock jump", "slow", "slow answer"),
    *("503", "500", "409", "lost request", "lost answer", "late", "twice", "retried"),
    *("denied", "torn list", "full disk", "slow disk", "defect"),
)

STEPS: Mapping[str, tuple[str, ...]] = {
    "probe": (ASK, LIST, SWAP, PUT),
    "desired": (ASK, SWAP),
    "start": (ASK, LIST, SWAP),
    "lease": (ASK, SWAP),
    "requests": (ASK, LIST, SWAP),
    "plan": (DISK,),
    "objects": (ASK, LIST),
    "brokers": (LOAD,),
    "arrival log": (ASK, LIST, SWAP),
    "landing": (ASK, LIST, SWAP, POINT),
    "survey": (DISK,),
    "decide": (POINT,),
    "move": (ASK, LIST, SWAP, PUT, DISK),
    "seal": (ASK, SWAP, POINT),
    "report": (POINT,),
    "status": (PUT, INNER),
    "reload": (ASK, LIST),
    "follow": (ASK, LIST),
    "load table": (LOAD,),
    "make table": (COMMIT,),
    "own file": (ASK, SWAP),
    "commit": (COMMIT,),
    "catalog entry": (ASK, SWAP, INNER),
    "pointer": (ASK, SWAP, INNER),
    "merge": (ASK, SWAP, INNER),
    "replace": (COMMIT,),
    "cut merged": (ASK, PUT),
    "delete merged": (ASK, LIST, PUT, INNER),
    "plan restore": (ASK, LIST),
    "claim": (ASK, SWAP),
    "fork": (SWAP,),
    "ask": (ASK, SWAP),
    "pin": (ASK, SWAP),
    "mark": (ASK, LIST, INNER),
    "condemn": (ASK, SWAP, INNER),
    "stub": (SWAP, INNER),
    "sweep": (PUT, INNER),
    "index": (ASK, SWAP, INNER),
    "note versions": (ASK, PUT, INNER),
    "watch": (ASK, LIST),
    "look around": (ASK, SWAP),
    "recover": (ASK, LIST, SWAP),
    "splice request": (ASK, SWAP),
    "splice plan": (ASK, LIST),
    "splice files": (PUT,),
    "splice seal": (SWAP,),
    "sink apply": (SERVE,),
    "sink mark": (ASK, SWAP),
}
"""Step -> sorts of its requests, in the order of an epoch, a compaction, a restore, a retention run."""

REASONS: Mapping[str, str] = {
    "p": "pure: between two requests a process can only die, sleep, or see its clock jump",
    "r": "reads only: there is no write to lose, delay or repeat",
    "u": "writes without a condition: no conflict to report, and a repetition has no second answer",
    "l": "no listing, no scratch, or not the work of a thread that can wait",
    "t": (
        "one transaction of a server that says yes or no: it is neither repeated on the way nor"
        " answered 409 or 500"
    ),
}


def kinds_of(step: str) -> frozenset[str]:
    """What may go wrong at a step."""
    return frozenset(kind for sort in STEPS[step] for kind in KINDS[sort])


TOPICS = ("brokers",)
"""Steps that only pipelines with topics take."""
IN_BUCKET = ("catalog entry",)
"""Steps of tables whose catalog is in the pipeline's own folder."""
IN_CATALOGS = ("load table", "make table", "commit", "replace", *IN_BUCKET)
"""Steps of tables of one kind of catalog."""
READING = ("objects", "arrival log")
"""Steps that only pipelines with objects take."""
SPLICING = ("splice request", "splice plan", "splice files", "splice seal")
"""Steps that only pipelines with streams take."""
OF_STREAMS = (("torn list", "move"),)
"""Cells that only those reach: only the backfill of an attachment lists anything in a move."""
SUPERVISED = ("watch", "look around", "recover", "desired")
"""Steps of Airflow's side."""

CELLS = tuple((kind, step) for step in STEPS for kind in _COLUMNS if kind in kinds_of(step))
"""Every cell that has to be reached."""


@lru_cache(maxsize=100_000)
def step_of(role: str, step: str, verb: str, key: str) -> str:
    """The protocol's step that a request belongs to."""
    special = {
        "catalog.load": "load table",
        "catalog.create": "make table",
        "catalog.commit": "commit",
        "serve": "sink apply",
        "brokers": "brokers",
    }
    if role in ("compact", "housekeeping") and verb == "catalog.commit":
        return "replace"
    if verb in special:
        return special[verb]
    if key.startswith("tidegate-probe/"):
        return "probe"
    if key.startswith("inbox/") and role != "land":
        return "objects"
    part = key.partition("/")[2]
    if part in _DOCUMENTS:
        return _DOCUMENTS[part]
    if part.endswith("/catalog.json"):
        return "catalog entry"
    if part == "roots.json":
        return {"gc": "condemn", "housekeeping": "condemn", "person": "pin"}.get(role, "claim")
    if (folder := part.partition("/")[0]) in _FOLDERS:
        return _FOLDERS[folder]
    if folder == "splices":
        return "splice plan" if verb == "list" else "splice request"
    return _BY_ROLE[role](step, verb, part)


_DOCUMENTS = {
    "lease.json": "lease",
    "desired.json": "desired",
    "status.json": "status",
    "iceberg/versions.json": "note versions",
}
_FOLDERS = {"index": "index", "arrivals": "arrival log"}


def _driver(step: str, verb: str, part: str) -> str:
    if part.startswith(("requests/", "acks/")):
        return "requests"
    if step in ("wait", "end", "publish", "load"):
        return "reload"
    return "fork" if step == "start" and verb == "create" and "/slots/" in part else step


def _publisher(_: str, verb: str, part: str) -> str:
    if "/merged/" in part:
        return "cut merged"
    if part.startswith("iceberg/"):
        return "pointer"
    return "own file" if "/tables/checkpoints/" in part else "follow"


def _compactor(_: str, verb: str, part: str) -> str:
    if part == "iceberg/current.json":
        return "pointer"
    return (
        "delete merged"
        if verb in ("list", "delete") or part.endswith("/metadata.json")
        else "merge"
    )


def _sink(_: str, verb: str, part: str) -> str:
    return "sink mark" if part.startswith("sinks/") else "follow"


def _restorer(_: str, verb: str, part: str) -> str:
    return "fork" if verb == "create" else "plan restore"


def _housekeeper(_: str, verb: str, part: str) -> str:
    if part == "iceberg/current.json":
        return "pointer"
    if part.startswith("iceberg/"):
        return "merge" if verb == "create" else "delete merged"
    return _collector(_, verb, part)


def _collector(_: str, verb: str, part: str) -> str:
    return {"swap": "stub", "delete": "sweep"}.get(verb, "mark")


def _merger(_: str, verb: str, part: str) -> str:
    if part.startswith(("requests/", "acks/")):
        return "ask"
    if verb == "put":
        return "splice files"
    return "splice seal" if verb == "create" else "splice plan"


def _person(_: str, verb: str, part: str) -> str:
    return "ask" if part.startswith("requests/") else "follow"


_BY_ROLE = {
    "driver": _driver,
    "housekeeping": _housekeeper,
    "lease": lambda *_: "lease",
    "status": lambda *_: "status",
    "publish": _publisher,
    "compact": _compactor,
    "sink": _sink,
    "restore": _restorer,
    "gc": _collector,
    "person": _person,
    "merge": _merger,
    "land": lambda *_: "landing",
    "airflow": lambda *_: "watch",
    "sweep": lambda *_: "look around",
    "recover": lambda *_: "recover",
    "stop": lambda *_: "look around",
}


def table(faults: Counter[tuple[str, str]]) -> str:
    """Faults injected: a row per step, a column per kind.

    ``-``: not reached; a letter: impossible, for that reason.
    """
    lines = [" " * 13 + "".join(f"{kind:>13}" for kind in _COLUMNS)]
    for step in STEPS:
        possible = kinds_of(step)
        cells = (
            (faults[kind, step] or "-") if kind in possible else _reason(step, kind)
            for kind in _COLUMNS
        )
        lines.append(f"{step:<13}" + "".join(f"{cell:>13}" for cell in cells))
    return "\n".join([*lines, *(f"{letter}: {why}" for letter, why in REASONS.items())])


def unreached(faults: Counter[tuple[str, str]]) -> Iterator[str]:
    """Cells that are possible and were not reached."""
    yield from (f"{kind} at {step}" for kind, step in CELLS if not faults[kind, step])


def _reason(step: str, kind: str) -> str:
    sorts = STEPS[step]
    if kind in ("torn list", "full disk", "slow disk", "defect"):
        return "l"
    if sorts in ((POINT,), (DISK,)):
        return "p"
    if COMMIT in sorts or SERVE in sorts:
        return "t"
    return "u" if PUT in sorts else "r"
