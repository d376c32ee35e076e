"""``make changes``: what a deploy of each changed spec does, and what its plan said before.

A row is a field of the spec, or a row of the table in `docs/recovery.md`. A column is what happens
around the deploy. Each cell is a pipeline with rows, open windows and rows that wait, on the real
engine with the oracle mover. A cell differs if a driver does something else than the plan said, or
than the table says. Ends with ``N cells (A applied, R refused), 0 differences``.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any

import structlog
import yaml  # type: ignore[import-untyped]
from tests.engine.harness import Bench, row
from tests.manual_clock import ManualClock
from tests.named_tests import ROOT
from tests.oracle.memory_source import MemorySource
from tests.servers.memory_store import MemoryBucket, MemoryStore
from tests.spec.changed_fields import BASE, FieldChange, Raw, find_change, merge

from tidegate.checkpoints.checkpoint_specs import plan_against_log
from tidegate.checkpoints.deployed_specs import (
    compare_with_copy,
    make_copy,
    read_copy,
    read_deployed,
    start_deploy,
)
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError, PoisonError, TidegateError
from tidegate.jobs.driver.launch_spec import LaunchSpec, choose_launch_spec
from tidegate.jobs.driver.startup import judge_failure, select_start_checkpoint
from tidegate.jobs.sinks.published_tables import read_positions
from tidegate.jobs.spec.field_rules import list_spec_fields
from tidegate.jobs.spec.job_spec import JobSpec, SupervisedSpec
from tidegate.jobs.spec.loader import load_any_spec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.spec_masks import mask_secrets
from tidegate.jobs.spec.spec_plan import (
    PlanExit,
    PlanRow,
    PlanVerdict,
    SpecPlan,
    plan_against_spec,
    plan_job_against_spec,
)
from tidegate.jobs.spec.user_code import collect_code
from tidegate.jobs.streams.dispatcher import StreamDispatcher, make_local_runner
from tidegate.jobs.streams.row_history import LogHistory


class Around(StrEnum):
    """What happens around a deploy."""

    RUNNING = "running"
    STOPPED = "stopped"
    CRASHED = "crashed"
    FAILS = "deploy fails"


class Outcome(StrEnum):
    """What has become of a changed spec."""

    APPLIED = "applied"
    WAITING = "waiting"
    REFUSED = "refused"


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        what: the field, or the row of the table.
        outcome: of the deploy.
        reason: what the plan says of the change.
        differences: in what drivers and the plan do not agree.
    """

    what: str
    around: Around
    outcome: Outcome
    reason: str
    differences: tuple[str, ...]


@dataclass(frozen=True)
class TableRow:
    """A change that a row of the table describes.

    Attributes:
        row: how the row begins.
        specs: the specs that are deployed one after the other; the last is the changed one.
        verdict: the word of the row that has to hold.
        is_busy: whether rows have come, so that windows are open and rows wait.
    """

    row: str
    specs: tuple[Raw, ...]
    verdict: str
    is_busy: bool = True


class World:
    """A store, a file of the spec, and drivers that run as a supervisor starts them."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "spec.yaml"
        for name in ("app.py", "other.py", "folds.py"):
            (folder / name).write_text("def add(state, rows): return state\nmore = add\n")
        self.store, self.clock = MemoryStore(), ManualClock()
        self.sources: dict[str, MemorySource] = {}

    def copy(self) -> World:
        """The same pipeline, to go on with apart from this one."""
        found = World(self.file.parent)
        found.store = MemoryStore(MemoryBucket(dict(self.store.bucket.objects)))
        found.clock = ManualClock(self.clock.monotonic())
        found.sources = copy.deepcopy(self.sources)
        return found

    def write(self, raw: Raw) -> None:
        """Change the file."""
        self.file.write_text(yaml.safe_dump(raw, sort_keys=False))

    def read(self) -> SupervisedSpec:
        """What the file says."""
        return load_any_spec(self.file)

    def deploy(self) -> None:
        """What `tidegate deploy` does, whatever the plan says."""
        spec = self.read()
        copy = make_copy(spec, collect_code(spec, self.file))
        start_deploy(self.store, spec.name, copy, who="olga")

    def choose(self) -> LaunchSpec:
        """What a driver would run now."""
        return choose_launch_spec(self.file, self.store)

    def feed(self) -> None:
        """Rows of two sources: one window closes, others stay open, and rows wait."""
        for name, seconds in (("a", (1, 5, 12, 31)), ("b", (2, 7, 25))):
            self.sources.setdefault(name, MemorySource(name)).append(
                *({**row(second), "q": "data", "u": None} for second in seconds)
            )

    def feed_later(self, second: int) -> None:
        """A row of one source, so that the next round seals an epoch."""
        self.sources["a"].append({**row(second), "q": "data", "u": None})

    def drive(self, launch: LaunchSpec | None = None, *, breaks: bool = False) -> Driver:
        """Start a driver, and let it have its first round."""
        driver = Driver(self, launch or self.choose())
        driver.begin(breaks=breaks)
        return driver

    def plan(self, spec: SupervisedSpec) -> SpecPlan:
        """What `tidegate plan` says with the store."""
        if isinstance(spec, PipelineSpec):
            return plan_against_log(self.log_of(spec), spec)
        current = read_deployed(self.store, spec.name).current
        if current is None:
            begins = PlanRow(spec.name, PlanVerdict.BEGINS, "nothing is deployed")
            return SpecPlan(spec.name, None, (begins,))
        old = read_copy(self.store, spec.name, current.digest).parse_spec()
        assert isinstance(old, JobSpec)
        return plan_job_against_spec(old, spec, "the deployed spec")

    def log_of(self, spec: SupervisedSpec) -> SlotLog:
        """Its log."""
        return SlotLog(self.store, spec.name, clock=self.clock)


class Driver:
    """One driver in this process: the steps of the product's, one after the other."""

    def __init__(self, world: World, launch: LaunchSpec) -> None:
        self._world, self.launch = world, launch

    def begin(self, *, breaks: bool) -> None:
        """Take the lease, and run until the first round has ended.

        Raises:
            TidegateError: what ended it; the lease is free then.
        """
        store, turn, spec = self._world.store, self.launch.turn, self.launch.spec
        me = ProcessIdentity.this_process()
        self.lease = Lease.acquire(store, spec.name, me, clock=self._world.clock)
        with ExitStack() as on_error:
            on_error.callback(self.lease.release)
            turn.begin(store)
            try:
                self._run_round(spec, breaks=breaks)
            except TidegateError as error:
                raise judge_failure(turn, store, error) from error
            turn.confirm(store)
            on_error.pop_all()

    def _run_round(self, spec: SupervisedSpec, *, breaks: bool) -> None:
        world = self._world
        if isinstance(spec, PipelineSpec):
            select_start_checkpoint(spec, world.log_of(spec), self.lease, "latest")
        if breaks:
            raise PoisonError("the first round broke", code="test.broken")
        if isinstance(spec, PipelineSpec):
            self._run_epoch(spec)

    def _run_epoch(self, spec: PipelineSpec) -> None:
        world = self._world
        bench = Bench(spec, world.store)
        bench.clock = world.clock
        bench.sources = {
            name: world.sources.setdefault(name, MemorySource(name)) for name in spec.sources
        }
        published = partial(read_positions, spec, world.store)
        history = LogHistory(world.log_of(spec), spec.event_time_column, published=published)
        run = make_local_runner(world.store, history)
        dispatch = StreamDispatcher(spec, run) if spec.streams else None
        bench.engine(dispatch=dispatch).run_epoch()

    def end(self) -> None:
        """Make room for the next driver."""
        self.lease.release()


@dataclass
class Trial:
    """One changed spec in one pipeline.

    Attributes:
        world: the pipeline, with the spec before deployed.
        verdict: a word of the table in the docs that has to hold; empty for a field.
        is_valid: whether the file with it can be read. Otherwise nothing judges the change.
    """

    world: World
    what: str
    new: Raw
    verdict: str = ""
    is_valid: bool = True
    differences: list[str] = field(default_factory=list)

    def run(self, around: Around) -> Cell:
        """Deploy the changed spec, and compare what comes of it with the plan."""
        world = self.world
        launch = world.choose()
        old, driver = launch.spec, Driver(world, launch)
        if around in (Around.RUNNING, Around.CRASHED):
            driver.begin(breaks=False)
        world.write(self.new)
        try:
            spec = world.read()
        except ConfigurationError as error:
            # No plan and no deploy reads it, and drivers go on with what is deployed.
            self._expect(world.choose().spec == old, "a driver runs an invalid file")
            self._expect(not self.is_valid, "no plan judges the file, because it is invalid")
            return self._make_cell(around, Outcome.REFUSED, error.message)
        self._expect(self.is_valid, "the file is valid")
        plan = world.plan(spec)
        self._check_plan(plan, old, spec)
        reason = "; ".join(f"{one.what}: {one.why}" for one in plan.rows)
        if around is Around.CRASHED:
            outcome = self._relaunch(old, spec, plan)
        else:
            world.deploy()
            if around is Around.RUNNING:
                # It has its turn until it makes room; another driver has to wait for the lease.
                driver.lease.renew()
                driver.end()
            outcome = self._start(plan, breaks=around is Around.FAILS)
        return self._make_cell(around, outcome, reason)

    def _relaunch(self, old: SupervisedSpec, spec: SupervisedSpec, plan: SpecPlan) -> Outcome:
        """A driver that ended without a word is replaced, with the changed file on the disk."""
        driver = self.world.drive()
        # Another pipeline begins; and a spec may say that it deploys itself.
        if spec.name != old.name or spec.supervision.deploy == "auto":
            return Outcome.APPLIED
        # Secrets are those of the file, because a copy has none.
        is_old = mask_secrets(driver.launch.spec) == mask_secrets(old)
        self._expect(is_old, "a crash has deployed the file")
        again = self.world.plan(spec)
        self._expect(_list_verdicts(again) == _list_verdicts(plan), "the plan is another one")
        return Outcome.WAITING

    def _start(self, plan: SpecPlan, *, breaks: bool) -> Outcome:
        """Start a driver with the deployed spec; if that fails, the one after it."""
        world, before = self.world, read_deployed(self.world.store, self.new["name"]).current
        try:
            driver = world.drive(breaks=breaks)
        except TidegateError as error:
            self._check_return(before)
            is_refused = "does not fit" in error.message
            if is_refused:
                for one in plan.rows:
                    says = one.verdict.value in ("refused", "restore")
                    self._expect(says == (f"{one.what}: " in error.message), f"{one.what} {says}")
            expected = plan.exit_code is PlanExit.REFUSED
            self._expect(is_refused == expected, f"the driver says {error.message}")
            self._expect(is_refused or breaks, f"the first round failed: {error.message}")
            return Outcome.REFUSED if is_refused else Outcome.WAITING
        self._expect(plan.exit_code is not PlanExit.REFUSED, "the plan refused what was applied")
        found = compare_with_copy(driver.launch.turn.copy, world.read(), {})
        code = [one for one in found if not one.field.startswith("code ")]
        self._expect(not code, f"the driver runs another spec: {code}")
        driver.end()
        return Outcome.APPLIED

    def _check_return(self, before: Any) -> None:
        """Whether drivers run the spec before again, and the reason is kept."""
        deployed = read_deployed(self.world.store, self.new["name"])
        if before is None:
            return
        self._expect(deployed.failed is not None, "the failure of the deploy was not noted")
        self._expect(deployed.wanted == before, "drivers do not go back to the spec before")
        self.world.drive().end()

    def _check_plan(self, plan: SpecPlan, old: SupervisedSpec, new: SupervisedSpec) -> None:
        """Compare the plan with the file, with the plan of two files, and with the table."""
        self._expect(plan.exit_code is not PlanExit.UNCHANGED, "the plan shows no change")
        for one in plan.rows:
            is_refused = one.verdict.value in ("refused", "restore")
            self._expect(bool(one.why), f"{one.what} has no reason")
            self._expect(bool(one.way_out) or not is_refused, f"{one.what} has no way out")
        if self.verdict:
            words = {"begins": "kept", "restore": "refused"}
            found = {words.get(one.verdict.value, one.verdict.value) for one in plan.rows}
            self._expect(self.verdict in found, f"the table says {self.verdict}, the plan {found}")
        if not isinstance(old, PipelineSpec) or not isinstance(new, PipelineSpec):
            return
        if old.name == new.name:
            self._check_file_plan(plan, plan_against_spec(old, new, "OLD"))

    def _check_file_plan(self, plan: SpecPlan, by_files: SpecPlan) -> None:
        """Compare with the plan of two files, which does not know the state."""
        expected = {
            PlanExit.REFUSED: {PlanExit.REFUSED},
            PlanExit.DEPENDS: {PlanExit.REFUSED, PlanExit.CHANGES},
            # What comes back after it was removed is only known from the store.
            PlanExit.CHANGES: {PlanExit.CHANGES, PlanExit.REFUSED},
            PlanExit.UNCHANGED: {PlanExit.UNCHANGED},
        }[by_files.exit_code]
        said = f"{by_files.exit_code.name} by two files, {plan.exit_code.name} by the store"
        self._expect(plan.exit_code in expected, said)
        if by_files.exit_code is PlanExit.CHANGES and "added" not in str(plan.rows):
            self._expect(plan.exit_code is PlanExit.CHANGES, said)

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.differences.append(otherwise)

    def _make_cell(self, around: Around, outcome: Outcome, reason: str) -> Cell:
        self._expect(bool(reason), "no reason")
        return Cell(self.what, around, outcome, reason, tuple(self.differences))


def _list_verdicts(plan: SpecPlan) -> list[tuple[str, str]]:
    return [(one.what, one.verdict.value) for one in plan.rows]


Field = tuple[type[PipelineSpec] | type[JobSpec], str]


def list_fields() -> Iterator[Field]:
    """Each field of pipelines and of jobs, with its model."""
    for model in (PipelineSpec, JobSpec):
        names = dict.fromkeys(path[-1] for path in list_spec_fields(model))
        for name in names:
            yield model, name


class Bases:
    """Pipelines with a spec deployed, each made once and copied for every cell."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._made = folder, dict[str, World]()

    def open(self, specs: Sequence[Raw], *, is_busy: bool) -> World:
        """A pipeline to which these specs were deployed, one after the other."""
        key = repr((specs, is_busy))
        if key not in self._made:
            world = World(self.folder)
            if is_busy:
                world.feed()
            for number, raw in enumerate(specs):
                world.write(raw)
                if number:
                    world.deploy()
                    if is_busy:
                        world.feed_later(40 + number)
                world.drive().end()
            self._made[key] = world
        found = self._made[key].copy()
        found.write(specs[-1])
        return found

    def run_cell(self, change: FieldChange | TableRow, around: Around) -> Cell:
        """Deploy a changed spec, and judge what comes of it."""
        if isinstance(change, FieldChange):
            world = self.open((change.old,), is_busy=True)
            trial = Trial(world, change.field, change.new, is_valid=change.is_valid)
            return trial.run(around)
        world = self.open(change.specs[:-1], is_busy=change.is_busy)
        return Trial(world, change.row, change.specs[-1], change.verdict).run(around)


def _list_table_rows() -> list[TableRow]:
    quiet = merge(BASE, {"checkpoint": {"idle_epochs": "always"}})
    window, source = dict(BASE["windows"]["w"]), BASE["sources"]["a"]

    def change(row: str, verdict: str, *changes: Raw, is_busy: bool = True) -> TableRow:
        """Specs that follow from the base, each from the one before."""
        specs = [BASE if is_busy else quiet]
        for one in changes:
            specs.append(merge(specs[-1], one))
        return TableRow(row, tuple(specs), verdict, is_busy)

    def edit_window(**fields: Any) -> Raw:
        """Other fields of the window."""
        return {"windows": {"w": fields}}

    without_window, wide = {"windows": {"w": None}}, {"sources": {"c": source}}
    plain = {"pipes": None}
    column = {"sources": {name: {"schema": {"extra": "double"}} for name in "ab"}}
    retyped = {"sources": {name: {"schema": {"v": "double"}} for name in "ab"}}
    no_column = {"sources": {name: {"schema": {"extra": None}} for name in "ab"}}
    turned = merge(BASE, without_window)
    turned["windows"]["w"] = {**window, "aggregates": {"s": "sum(v)", "n": "count(*)"}}
    paris, rome = (
        {"sources": {"a": {"timezone": zone}}} for zone in ("Europe/Paris", "Europe/Rome")
    )
    folded = {"aggregates": None, "function": "folds:add", "initial": {"total": 0}}
    by_function = merge(quiet, {"reducers": {"adding": folded}})
    other_function = merge(by_function, {"reducers": {"adding": {"function": "folds:more"}}})
    return [
        change("a window added", "kept", {"windows": {"x": window}}),
        change("a window removed", "dropped", without_window),
        change(
            "a window that comes back after it was removed",
            "refused",
            without_window,
            {"windows": {"w": window}},
        ),
        change("a window's keys, kind", "refused", edit_window(size="20s")),
        TableRow("the order of sources", (BASE, turned), "kept"),
        change("a window's aggregates (added", "refused", edit_window(aggregates={"m": "max(v)"})),
        change(
            "a window's aggregates (added",
            "kept",
            edit_window(aggregates={"m": "max(v)"}),
            is_busy=False,
        ),
        change(
            "an aggregate of another type",
            "refused",
            edit_window(aggregates={"s": "max(kind)"}),
            is_busy=False,
        ),
        change(
            "`lateness` of a window, smaller",
            "kept",
            edit_window(lateness="5s"),
            edit_window(lateness="1s"),
            is_busy=False,
        ),
        change("`lateness` of a window, larger", "refused", edit_window(lateness="5s")),
        change("`lateness` of a window, larger", "kept", edit_window(lateness="5s"), is_busy=False),
        change("`on_late`, `late_unit`", "kept", edit_window(on_late="drop")),
        change("`min_window_start`", "kept", edit_window(min_window_start=1)),
        change("a source added", "kept", wide),
        change("a source removed", "dropped", {"sources": {"b": None}}),
        change("`lag`, idle and barrier", "kept", {"sources": {"a": {"lag": "9s"}}}),
        change("a source's `path`", "refused", {"sources": {"a": {"path": "inbox/z/"}}}),
        change("`timezone` of a source, added", "kept", paris),
        change("`timezone` of a source, changed", "refused", paris, rome),
        change("a source or reducer that comes back", "kept", wide, {"sources": {"c": None}}, wide),
        change(
            "a source or reducer that comes back",
            "refused",
            wide,
            {"sources": {"c": None}},
            {"sources": {"c": merge(source, {"path": "inbox/z/"})}},
        ),
        change("a column added", "kept", plain, column),
        change("a column removed", "refused", plain, column, no_column),
        change("a column removed", "kept", plain, column, no_column, is_busy=False),
        change("a column's type", "refused", plain, retyped),
        change("`buffer` of a stream", "kept", {"streams": {"copy": {"buffer": True}}}),
        change(
            "a pipe's or reducer's `from`", "refused", {"reducers": {"adding": {"from": "copy"}}}
        ),
        TableRow("a reducer's `function`", (by_function, other_function), "kept", is_busy=False),
        change("`release.mode`, `glom`", "refused", {"release": {"mode": "commit"}}),
        change("`release.mode`, `glom`", "kept", {"release": {"mode": "commit"}}, is_busy=False),
        change("description, quality", "kept", {"description": "other"}),
        change("`outputs.layout`, `compact`", "kept", {"outputs": {"compact": False}}),
    ]


TABLE_ROWS = _list_table_rows()
"""A change for each row of the table, and for each case of a row."""


def read_table() -> list[tuple[str, str]]:
    """The rows of the table in `docs/recovery.md`: the change, and what becomes of the state."""
    text = (ROOT / "docs/recovery.md").read_text("utf-8")
    table = text.partition("| change | what becomes of the state |\n")[2].partition("\n\n")[0]
    rows = (line.strip("| ").split(" | ") for line in table.splitlines()[1:])
    return [(change, state) for change, state in rows]


def main() -> int:
    """Print a line for each cell, and the sums."""
    outcomes, differing = Counter[Outcome](), 0
    # A process is started for each core, because most of a cell is Python.
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(os.cpu_count(), context) as processes,
    ):
        rows = [*list_fields(), *TABLE_ROWS]
        for cells in processes.map(partial(_run_cells, folder), rows):
            for cell in cells:
                outcomes[cell.outcome] += 1
                differing += bool(cell.differences)
                end = f"  DIFFERS: {'; '.join(cell.differences)}" if cell.differences else ""
                line = f"{cell.what:45} {cell.around:12} {cell.outcome:8} {cell.reason[:90]}{end}"
                sys.stdout.write(line.replace("\n", " ") + "\n")
            sys.stdout.flush()
    applied, refused = outcomes[Outcome.APPLIED], outcomes[Outcome.REFUSED]
    sys.stdout.write(
        f"{outcomes.total()} cells ({applied} applied, {refused} refused), {differing} differences\n"
    )
    return int(differing > 0)


@cache
def _open_bases(folder: str) -> Bases:
    """The pipelines of this process, in a folder of its own."""
    return Bases(Path(tempfile.mkdtemp(dir=folder)))


def _run_cells(folder: str, row: TableRow | Field) -> list[Cell]:
    """Run the cells of a row.

    Raises:
        LookupError: no value is known with which a field is valid.
    """
    change = row if isinstance(row, TableRow) else find_change(*row)
    if change is None:
        raise LookupError(f"no change of {row}; add one to tests/spec/changed_fields.py")
    bases = _open_bases(folder)
    with imports_from(str(bases.folder)):
        return [bases.run_cell(change, around) for around in Around]


@contextmanager
def imports_from(folder: str) -> Iterator[None]:
    """Let the functions of reducers be found, and the log of drivers be silent."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        structlog.reset_defaults()


if __name__ == "__main__":
    sys.exit(main())
