"""The state of a local stack between commands, and the lines of progress that they print.

Ports and processes are in `stack.json`, secrets in `credentials.json`.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from tidegate.checkpoints.pipeline_identity import read_boot_id
from tidegate.errors import ConfigurationError

from .errors import STACK_FILE_DAMAGED
from .local_processes import ProcessId
from .provision import Credentials

#: Every role Airflow's simple login knows, so that permissions can be tried out.
AIRFLOW_USERS = {"admin": "admin", "olga": "op", "uwe": "user", "vic": "viewer"}

_STATE_FORMAT = 1


@dataclass
class StackState:
    """The contents of `stack.json`, without secrets.

    Attributes:
        stack_id: random; processes that Airflow starts have it in `TIDEGATE_STACK_ID`.
        boot_id: the boot during which the processes were started; start ticks mean nothing after
            another one.
        ports: by server (`minio`, `airflow`); kept after `down`, so that addresses stay the same.
        processes: by name.
        airflow_digest: of the environment Airflow was started with; when it changes, Airflow has to
            be restarted.
        migrated: the Airflow version that has prepared the database.
        alerts: receiver and variable of the alerts of pipelines whose spec has none.
    """

    stack_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    boot_id: str = field(default_factory=read_boot_id)
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, ProcessId] = field(default_factory=dict)
    airflow_digest: str = ""
    migrated: str = ""
    alerts: tuple[str, str] | None = None

    @classmethod
    def load(cls, file: Path) -> StackState:
        """Read the file; a missing file is a stack that never ran.

        After a reboot no processes are named: the stack has none.

        Raises:
            ConfigurationError: the file is not a stack's state.
        """
        try:
            data = json.loads(file.read_text("utf-8"))
            if data.pop("format") != _STATE_FORMAT or "processes" not in data:
                raise ValueError(f"format {_STATE_FORMAT} expected")
            state = TypeAdapter(cls).validate_python(data)
        except FileNotFoundError:
            return cls()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _build_file_error(file, error) from error
        # Pids and start ticks of an earlier boot may be those of other processes now.
        if state.boot_id != read_boot_id():
            state.boot_id, state.processes = read_boot_id(), {}
        return state

    def save(self, file: Path) -> None:
        """Replace the file in one step."""
        write_private_json(file, {"format": _STATE_FORMAT, **asdict(self)})


@dataclass(frozen=True)
class StackSecrets:
    """The contents of `credentials.json`, made once per stack. They are not in `repr`."""

    minio_root: Credentials = field(repr=False)
    minio_app: Credentials = field(repr=False)
    airflow_passwords: dict[str, str] = field(repr=False)
    jwt_secret: str = field(repr=False)
    api_secret_key: str = field(repr=False)
    fernet_key: str = field(repr=False)

    @classmethod
    def generate(cls) -> StackSecrets:
        """Return new secrets."""
        return cls(
            minio_root=Credentials.generate("root"),
            minio_app=Credentials.generate("app"),
            airflow_passwords={user: secrets.token_urlsafe(12) for user in AIRFLOW_USERS},
            jwt_secret=secrets.token_urlsafe(48),
            api_secret_key=secrets.token_urlsafe(32),
            fernet_key=base64.urlsafe_b64encode(os.urandom(32)).decode(),
        )

    @classmethod
    def load_or_make(cls, file: Path) -> StackSecrets:
        """Read the file, or make new secrets and write it, readable by its owner only.

        Raises:
            ConfigurationError: the file is damaged.
        """
        try:
            return TypeAdapter(cls).validate_json(file.read_bytes())
        except FileNotFoundError:
            made = cls.generate()
            write_private_json(file, asdict(made))
            return made
        except ValueError as error:
            # Without its cause, whose text has the secrets.
            raise _build_file_error(file, error) from None


def write_private_json(file: Path, data: object) -> None:
    """Write JSON that only its owner may read.

    A reader sees the old or the new file, never a part of one.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename is atomic only within one file system.
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as output:
        json.dump(data, output, indent=2)
        output.write("\n")
    draft.rename(file)


@contextmanager
def lock_stack(lock: Path) -> Iterator[None]:
    """Hold a stack's lock for one command; a second command waits.

    The lock ends with the process, so a killed command leaves nothing to clean up.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _build_file_error(file: Path, error: Exception) -> ConfigurationError:
    return STACK_FILE_DAMAGED(file=file, cause=type(error).__name__, folder=file.parent)


#: Takes one line of plain text.
Progress = Callable[[str], None]


def add_times(progress: Progress) -> Progress:
    """Return a `Progress` that writes the seconds since this call in front of each line."""
    began = time.monotonic()
    return lambda line: progress(f"[{time.monotonic() - began:5.1f} s] {line}")
