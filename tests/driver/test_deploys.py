"""Which spec a driver runs, and how a deploy is confirmed or goes back, with real short runs."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from tests.git_commands import run_git
from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.deployed_specs import (
    DeployedDocument,
    make_copy,
    read_copy,
    read_deployed,
    start_deploy,
    write_copy,
)
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.shared_documents import change_document
from tidegate.errors import ConfigurationError, FencedError, TransientError
from tidegate.jobs.driver.launch_spec import LaunchSpec, choose_launch_spec, make_file_launch
from tidegate.jobs.driver.pipeline_run import RunOptions, run_until_end
from tidegate.jobs.driver.startup import lock_folder
from tidegate.jobs.spark import mover
from tidegate.jobs.spark.local_session import LocalSession
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.loader import load_any_spec, load_spec
from tidegate.jobs.spec.pipeline import PipelineSpec

SPEC = """\
apiVersion: tidegate/v1
name: p
sources: {a: {path: in, format: json, schema: {t: timestamp, v: double}, event_time: t, lag: 1s}}
"""
NEW = SPEC.replace("1s", "2s")
ROWS = '{"t": "2026-01-01T00:00:00Z", "v": 1.0}\n'


class Place:
    """A store, a spec file beside it, and drivers that run as a supervisor starts them."""

    def __init__(self, folder: Path) -> None:
        self.store, self.file = LocalStore(folder / "store"), folder / "p.yaml"
        self.file.write_text(SPEC)
        self.store.put("in/1.json", ROWS.encode())

    def choose(self) -> LaunchSpec:
        """What a driver would run now."""
        return choose_launch_spec(self.file, self.store)

    def run(self, launch: LaunchSpec | None = None) -> LaunchSpec:
        """Run a driver until its source is read to its end."""
        launch = launch or self.choose()
        options = RunOptions(self.store.url, ends_input=True, deploy=launch.turn)
        assert isinstance(launch.spec, PipelineSpec)
        run_until_end(launch.spec, options)
        return launch

    def deploy(self, text: str) -> None:
        """Ask for a deploy of a changed file."""
        self.file.write_text(text)
        copy = make_copy(load_any_spec(self.file), {})
        start_deploy(self.store, "p", copy, who="olga", why="more lag")

    @property
    def deployed(self) -> DeployedDocument:
        """What is deployed."""
        return read_deployed(self.store, "p")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(mover, "open_session", lambda _: LocalSession())
    return Place(tmp_path)


def lag_of(launch: LaunchSpec) -> int | None:
    """The lag of the source, in seconds."""
    assert isinstance(launch.spec, PipelineSpec)
    lag = launch.spec.sources["a"].lag
    return None if lag is None else lag // 1_000_000


def test_a_crash_does_not_deploy(place: Place) -> None:
    """Later drivers run the sealed copy, whatever lies on the disk, or if nothing valid does."""
    place.run()
    current = place.deployed.current
    assert current is not None
    assert current.who == "driver"
    place.file.write_text(NEW)
    assert lag_of(place.run()) == 1
    place.file.write_text("name: p\nsources: [")
    assert lag_of(place.choose()) == 1
    place.file.unlink()
    assert lag_of(place.choose()) == 1
    assert place.deployed.current == current


def test_before_the_first_round_the_file_counts(place: Place) -> None:
    """A first launch that fails is corrected in the file; a mistake in it is reported."""
    place.file.write_text("name: p\nsources: [")
    with pytest.raises(ConfigurationError, match="not valid YAML"):
        place.choose()
    place.file.write_text(NEW)
    assert lag_of(place.choose()) == 2
    assert place.deployed.wanted is None


def test_a_deploy_is_confirmed_by_a_round(place: Place) -> None:
    """Then it is what drivers run; its copy is the file, so nothing differs."""
    place.run()
    place.deploy(NEW)
    assert place.deployed.trying is not None
    assert lag_of(place.run()) == 2
    found = place.deployed
    assert (found.trying, found.attempts) == (None, 0)
    assert found.current is not None
    assert (found.current.who, found.current.why) == ("olga", "more lag")


def test_a_deploy_that_does_not_fit_goes_back(place: Place) -> None:
    """The driver ends with an error that passes; the next one runs the spec before."""
    place.run()
    place.deploy(SPEC.replace("v: double", "v: string"))
    with pytest.raises(TransientError, match="the deploy of p by olga failed") as failed:
        place.run()
    assert failed.value.code == "deploy.failed"
    assert place.deployed.failed is not None
    assert place.deployed.failed.code == "spec.does_not_fit"
    assert lag_of(place.run()) == 1
    assert place.deployed.failed is not None


def test_a_driver_that_waited_with_an_older_copy_ends(place: Place) -> None:
    """A standby that was started before a deploy gives its turn to the next process."""
    place.run()
    waiting = place.choose()
    place.deploy(NEW)
    with pytest.raises(FencedError, match="another spec of p is deployed"):
        place.run(waiting)
    assert lag_of(place.run()) == 2


def test_a_person_runs_and_deploys_a_file(place: Place) -> None:
    """Whatever is deployed; a run that does not begin deploys nothing."""
    place.run()
    other = place.file.with_name("other.yaml")
    other.write_text(SPEC.replace("v: double", "v: string"))
    for text, fits in ((other.read_text(), False), (NEW, True)):
        other.write_text(text)
        launch = make_file_launch(load_spec(other), other, who="bob", why="run", replaces=True)
        if fits:
            place.run(launch)
        else:
            with pytest.raises(ConfigurationError, match="does not fit"):
                place.run(launch)
    assert lag_of(place.choose()) == 2
    assert place.deployed.current is not None
    assert place.deployed.current.who == "bob"


def test_a_spec_may_deploy_itself(place: Place) -> None:
    """With `deploy: auto`, if the plan refuses nothing; what has failed is not tried again."""
    auto = "supervision: {deploy: auto}\n"
    place.run()
    place.file.write_text(SPEC.replace("v: double", "v: string") + auto)
    assert lag_of(place.choose()) == 1
    assert place.deployed.trying is None
    place.file.write_text(NEW + auto)
    assert lag_of(place.run()) == 2
    assert place.deployed.current is not None
    assert place.deployed.current.who == "the spec"
    assert place.choose().turn.deploy == place.deployed.current


AUTO = "supervision: {deploy: auto}\n"


def run_pinned_commit(place: Place) -> Path:
    """Run a spec that deploys itself; the same file in a version of a git bundle."""
    pinned = place.file.parent / "versions" / ("a" * 40) / "p.yaml"
    pinned.parent.mkdir(parents=True)
    for file in (pinned, place.file):
        file.write_text(SPEC + AUTO)
    place.run()
    return pinned


def test_a_pinned_older_commit_does_not_deploy_itself(place: Place) -> None:
    """A run that began with an older version of a git bundle launches drivers with its file."""
    pinned = run_pinned_commit(place)
    place.deploy(NEW + AUTO)
    assert lag_of(choose_launch_spec(pinned, place.store)) == 2
    assert lag_of(place.run()) == 2
    assert lag_of(choose_launch_spec(pinned, place.store)) == 2
    pinned.write_text(NEW.replace("2s", "3s") + AUTO)
    assert lag_of(choose_launch_spec(pinned, place.store)) == 3


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_pinned_older_commit_of_a_store_without_history(place: Place, is_readable: bool) -> None:
    """Its copy has a digest of an older version, or cannot be read; commits are not known."""
    pinned = run_pinned_commit(place)
    layout, first = BucketLayout("p"), place.deployed.current
    assert first is not None
    key = layout.spec_copy_key(first.digest)
    copy = read_copy(place.store, "p", first.digest)
    place.deploy(NEW + AUTO)
    place.run()
    fields = {**json.loads(copy.spec), "description": "" if is_readable else ["of old"]}
    old = copy.model_copy(update={"spec": json.dumps(fields)})
    assert old.digest != copy.digest
    write_copy(place.store, "p", old)
    place.store.delete(key)
    change_document(
        place.store,
        layout.deployed_key,
        DeployedDocument(),
        lambda before: before.model_copy(update={"past": ()}),
    )
    assert lag_of(choose_launch_spec(pinned, place.store)) == 2
    assert place.deployed.trying is None


def test_git_knows_which_pinned_commit_is_older(place: Place) -> None:
    """Also one that drivers never ran; a newer one deploys itself past a copy of another version."""
    bundle = place.file.parent / "team"
    bundle.mkdir()
    run_git(bundle, "init", "--quiet", "bare")
    commits = []
    for lag in (1, 2, 3):
        text = SPEC.replace("1s", f"{lag}s") + AUTO
        run_git(bundle / "bare", "commit", "--quiet", "--allow-empty", "-m", str(lag))
        commits.append(run_git(bundle / "bare", "rev-parse", "HEAD"))
        spec = bundle / "versions" / commits[-1] / "p.yaml"
        spec.parent.mkdir(parents=True)
        spec.write_text(text)
    files = [bundle / "versions" / commit / "p.yaml" for commit in commits]
    place.file = files[1]
    place.run()
    copy = read_copy(place.store, "p", place.choose().turn.deploy.digest)
    write_copy(place.store, "p", copy.model_copy(update={"spec": '{"gone": 1}'}))
    assert lag_of(choose_launch_spec(files[0], place.store)) == 2
    assert lag_of(choose_launch_spec(files[2], place.store)) == 3


def test_a_job_runs_its_sealed_script(place: Place) -> None:
    """In place while the checkout equals the copy; it always writes beside the file."""
    file, script = place.file.with_name("j.yaml"), place.file.with_name("app.py")
    file.write_text("apiVersion: tidegate/v1\nkind: job\nname: j\napp: app.py\n")
    script.write_text("import lib.helper\n")
    helper = script.parent / "lib/helper.py"
    helper.parent.mkdir()
    helper.write_text("x = 1\n")
    first = choose_launch_spec(file, place.store)
    first.turn.begin(place.store)
    first.turn.confirm(place.store)
    second = choose_launch_spec(file, place.store)
    assert first.folder == second.folder == script.parent
    helper.write_text("x = 2\n")
    third = choose_launch_spec(file, place.store)
    assert isinstance(third.spec, JobSpec)
    assert lock_folder(third.folder) is None  # other drivers leave it alone
    assert third.script.read_text() == "import lib.helper\n"
    assert (third.folder / "lib/helper.py").read_text() == "x = 1\n"
    script.unlink()
    gone = choose_launch_spec(file, place.store)
    for launch in (first, third, gone):
        assert launch.script_place == script


def test_code_of_killed_jobs_is_removed(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next launch that has a folder of code; a folder that is young may get a lock soon."""
    temporary = tmp_path / "temporary"
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    dead, young = (temporary / f"tidegate-code-{name}" for name in ("dead", "young"))
    for folder in (dead, young):
        folder.mkdir(parents=True)
        (folder / ".lock").touch()
    os.utime(dead / ".lock", (0, 0))
    file, script = place.file.with_name("j.yaml"), place.file.with_name("app.py")
    file.write_text("apiVersion: tidegate/v1\nkind: job\nname: j\napp: app.py\n")
    script.write_text("x = 1\n")
    first = choose_launch_spec(file, place.store)
    first.turn.begin(place.store)
    first.turn.confirm(place.store)
    assert dead.exists()
    script.write_text("x = 2\n")
    assert choose_launch_spec(file, place.store).folder.parent == temporary
    assert (dead.exists(), young.exists()) == (False, True)


def test_a_pipeline_runs_the_code_of_its_copy(place: Place) -> None:
    """From the first launch on, so that a checkout may change or go. Data beside it is found."""
    reducer = "{from: events, to: d, function: 'lib.sums:fold'}"
    graph = f"streams: {{d: {{schema: {{v: long}}}}}}\nreducers: {{r: {reducer}}}\n"
    place.file.write_text(SPEC + graph)
    module, rates = place.file.parent / "lib/sums.py", place.file.parent / "lib/rates.csv"
    module.parent.mkdir()
    module.write_text("x = 1\n")
    rates.write_text("EUR,1\n")
    (module.parent / "gone").symlink_to("nowhere")
    first = choose_launch_spec(place.file, place.store)
    assert lock_folder(first.folder) is None  # other drivers leave it alone
    opened = os.open(first.folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as systemd-tmpfiles would
    os.close(opened)
    assert (first.folder / "lib/rates.csv").read_text() == "EUR,1\n"
    module.write_text("x = 2\n")
    assert (first.folder / "lib/sums.py").read_text() == "x = 1\n"


def test_a_pinned_commit_stays_older_after_many_deploys(place: Place) -> None:
    """The history of deploys is bounded; what was deployed once is kept as a copy."""
    pinned = run_pinned_commit(place)
    for number in range(2, 25):
        place.deploy(NEW.replace("2s", f"{number}s") + AUTO)
        place.run()
    assert lag_of(choose_launch_spec(pinned, place.store)) == 24
