"""``make team``: asks twelve questions of a team, and lets the commands of the how-to pages answer.

Each page of `docs/how-to/` is followed in a copy of `docs/how-to/orders/`, as a reader would: files
that it shows are written, commands run in one shell, and what they print is compared with the page.
``...`` on a page is any text. Further pages follow. Ends with ``N of 12``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.named_tests import ROOT
from tests.servers.alert_receivers import running as running_receivers
from tests.servers.minio import running
from tests.servers.spark import standalone
from tests.wheels import build_earlier_wheel, build_wheels

PAGES = ROOT / "docs/how-to"
QUESTIONS: Mapping[str, str] = {
    "How do I deploy to three environments?": "three-environments.md",
    "How do alerts get to Slack?": "alerts-to-slack.md",
    "How do I upgrade?": "upgrade.md",
    "How do I back up?": "back-up.md",
    "How do I use S3 on AWS with a role?": "s3-with-a-role.md",
    "How do I run on a cluster?": "cluster.md",
    "How do I enrich rows with a customer table?": "enrich.md",
    "How do I remove duplicates?": "deduplicate.md",
    "How do I get the top 3 of each window?": "top-n.md",
    "How do I test my pipeline in CI?": "test-in-ci.md",
    "How do I preview a change?": "preview-a-change.md",
    "What happens to the state if I change a window?": "change-a-window.md",
}
"""The page of each question of the twelve."""
FURTHER: Mapping[str, str] = {
    "The tutorial": "../tutorial.md",
    "Why does my last window never close?": "last-window.md",
    "How do I add a column?": "add-a-column.md",
}
"""Pages that are followed too, and not counted among the twelve."""

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# ([\w./-]+\.\w+)\n")


@dataclass(frozen=True)
class Step:
    """Something that a page tells its reader to do.

    Attributes:
        file: to write; empty for commands.
        text: of the file, or the commands.
        output: of the commands; None if the page does not show it.
    """

    file: str
    text: str
    output: str | None = None


def read_steps(page: str) -> list[Step]:
    """What a page tells its reader to do: its files, and its commands with their output.

    A block that begins with a comment of a file's name is that file, without the comment. A block ``text`` is the output
    of the commands before it.
    """
    steps: list[Step] = []
    for kind, text in _BLOCK.findall(page):
        named = _FILE_NAME.match(text)
        if kind == "text":
            steps[-1] = Step("", steps[-1].text, text)
        elif kind == "sh":
            steps.append(Step("", text))
        elif named:
            steps.append(Step(named[1], text[named.end() :]))
    return steps


def is_output(expected: str, printed: str) -> bool:
    """Whether commands printed what a page shows; the number of spaces is not compared."""
    parts = (r"\s+".join(map(re.escape, part.split())) for part in expected.split("..."))
    pattern = r"\s*" + r"(?:\s*.*?\s*)".join(parts) + r"\s*"
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def follow_page(page: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Do what a page says.

    Returns:
        What was printed where it is not what the page shows; empty if all is as shown.
    """
    for step in read_steps(page):
        if step.file:
            path = folder / step.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text)
            continue
        found = subprocess.run(
            ["bash", "-c", step.text],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        # Commands whose output is shown may end with a code that says something, such as `plan`.
        failed = step.output is None and found.returncode != 0
        if failed or not is_output(step.output or "...", found.stdout):
            return f"{step.text}printed, with exit code {found.returncode}:\n{found.stdout}"
    return ""


Prepared = AbstractContextManager[Mapping[str, str]]


@contextmanager
def _prepare_earlier_version(folder: Path) -> Iterator[Mapping[str, str]]:
    """An environment with the code of an earlier commit, and wheels of today's to install."""
    wheel = build_earlier_wheel(folder)
    build_wheels(ROOT, folder / "orders/dist")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    # pip, and the packages that tidegate needs, are those of this Python.
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib"))
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--force-reinstall", str(wheel)], check=True)
    yield {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}


@contextmanager
def _prepare_bucket(folder: Path) -> Iterator[Mapping[str, str]]:
    """A bucket whose keys are found as those of a role are."""
    with running(folder, "orders-prod") as minio:
        yield {
            "AWS_ENDPOINT_URL_S3": minio.server.endpoint,
            "AWS_ACCESS_KEY_ID": minio.app.access_key,
            "AWS_SECRET_ACCESS_KEY": minio.app.secret_key,
        }


@contextmanager
def _prepare_cluster(folder: Path) -> Iterator[Mapping[str, str]]:
    """A standalone cluster of one worker."""
    with standalone(folder, 1) as cluster:
        yield {"SPARK_MASTER": cluster.master}


@contextmanager
def _prepare_slack(_: Path) -> Iterator[Mapping[str, str]]:
    """The variable of a webhook, behind which every message has to be one that Slack takes."""
    with running_receivers() as receivers:
        yield {"SLACK_WEBHOOK_URL": receivers.environment["SLACK_WEBHOOK_URL"]}
    if receivers.refused or not receivers.taken:
        raise AssertionError(f"Slack took {len(receivers.taken)} messages, not {receivers.refused}")


_PREPARATIONS: Mapping[str, Callable[[Path], Prepared]] = {
    "upgrade.md": _prepare_earlier_version,
    "s3-with-a-role.md": _prepare_bucket,
    "cluster.md": _prepare_cluster,
    "alerts-to-slack.md": _prepare_slack,
}


def answer(page: str) -> str:
    """Follow the page of a question; returns what is not as the page shows it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(PAGES / "orders", folder / "orders")
        prepare = _PREPARATIONS.get(page)
        with prepare(folder) if prepare else nullcontext({}) as prepared:
            environment = {**_make_environment(), **prepared}
            return follow_page((PAGES / page).read_text(), folder / "orders", environment)


def _make_environment() -> dict[str, str]:
    """That of a user who has set nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "COLUMNS": "120", "NO_COLOR": "1"}


_SETTINGS = ("TIDEGATE_", "AWS_", "PYTHONPATH")


def main(arguments: Sequence[str]) -> int:
    """Answer the questions, or only those whose pages are named, and print a line for each."""
    known = {**QUESTIONS, **FURTHER}
    chosen = [question for question, page in known.items() if not arguments or page in arguments]
    answered = [question for question in chosen if _print_answer(question, known[question])]
    counted = [question for question in chosen if question in QUESTIONS or arguments]
    yes = sum(question in answered for question in counted)
    sys.stdout.write(f"{yes} of {len(counted)}\n")
    return int(len(answered) < len(chosen))


def _print_answer(question: str, page: str) -> bool:
    """Follow a page and print a line; return whether all is as it shows."""
    started = time.monotonic()
    difference = answer(page)
    verdict, seconds = "no " if difference else "yes", time.monotonic() - started
    sys.stdout.write(f"{verdict} {question:50} {page:22} {seconds:5.0f} s\n")
    sys.stdout.write(f"    {difference.rstrip()}\n" if difference else "")
    sys.stdout.flush()
    return not difference


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
