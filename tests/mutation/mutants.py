"""The mutants of the trusted core: where cosmic-ray's operators, and one of ours, can change it."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.python.tree import Keyword

ROOT = Path(__file__).resolve().parents[2]
# The log, the lease, restore, retention, the decider and the followers of the log.
CORE = (
    "checkpoints/slot_log.py",
    "checkpoints/slot_index.py",
    "checkpoints/manifest.py",
    "checkpoints/lease.py",
    "checkpoints/pins.py",
    "checkpoints/restore.py",
    "checkpoints/retention.py",
    "jobs/engine/epoch_engine.py",
    "jobs/engine/manifest_writer.py",
    "jobs/engine/publisher.py",
    "jobs/eventtime/barriers.py",
    "jobs/eventtime/decider.py",
    "jobs/eventtime/frontiers.py",
    "jobs/eventtime/members.py",
    "jobs/eventtime/pipeline_clock.py",
    "jobs/eventtime/decider_state.py",
    "jobs/sinks/base_follower.py",
    "jobs/sinks/lineage_position.py",
    "jobs/sinks/table_follower.py",
)
Position = tuple[int, int]
_CALL = "tidegate/RemoveCall"


class RemoveCall(Operator):  # type: ignore[misc]  # cosmic-ray has no types
    """Replace a statement that is only a call by `pass`: a check or an effect that is left out."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Position, Position]]:
        """Yield the place of the node if it is such a statement."""
        if node.type == "atom_expr" and node.parent.type == "simple_stmt":
            last = node.children[-1]
            if last.type == "trailer" and last.children[0] == "(":
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Return the `pass` that replaces the call."""
        return Keyword("pass", node.start_pos, prefix=node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple[()]:
        """None: the test of this folder has them."""
        return ()


@dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Attributes:
        path: the module, from the project's root.
        operator: the name of the operator, and `occurrence` which of its places.
        line: of the place, counted from 1.
        before: the changed line as it was, without indentation.
        after: the same as it is in the mutant; it may be empty.
        digest: of the module's source. Results of another source do not count.
    """

    path: str
    operator: str
    occurrence: int
    line: int
    before: str
    after: str
    digest: str

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return f"{self.path}:{self.operator}:{self.occurrence}:{self.digest}"

    @property
    def title(self) -> str:
        """Place and change, for people."""
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after or '(nothing)'}"

    def read_source(self) -> str:
        """Return the source of the mutated module."""
        source = mutate_code(_read(self.path), _make_operator(self.operator), self.occurrence)
        assert source is not None
        return str(source)

    def to_record(self) -> dict[str, Any]:
        """Fields for JSON."""
        return asdict(self)


def draw_mutants(count: int, seed: int, paths: tuple[str, ...] = CORE) -> list[Mutant]:
    """Draw mutants without repetition: first places, evenly, then one operator for each place.

    Drawing from all pairs of place and operator would give mostly replacements of `+` and `-`,
    for which there are eleven operators. Each place has a lot of its own, so that a change of one
    module leaves those drawn from the others as they are.
    """
    places: dict[tuple[str, Position], list[tuple[str, int]]] = {}
    for path in paths:
        for operator, occurrence, start in _find_places(path):
            places.setdefault((path, start), []).append((operator, occurrence))
    dice = {place: random.Random(f"{seed} {place}") for place in places}
    lots = {place: own.random() for place, own in dice.items()}
    found = []
    for path, start in sorted(places, key=lots.__getitem__):
        operator, occurrence = dice[path, start].choice(places[path, start])
        mutant = _build_mutant(path, operator, occurrence, start)
        if mutant is not None:
            found.append(mutant)
        if len(found) == count:
            break
    return found


@cache
def _read(path: str) -> str:
    return (ROOT / path).read_text()


def _make_operator(name: str) -> Any:
    return RemoveCall() if name == _CALL else get_operator(name)()


def _find_places(path: str) -> Iterator[tuple[str, int, Position]]:
    """Yield operator, occurrence and place of everything that can change outside annotations."""
    tree = get_ast(_read(path))
    nodes = list(ast_nodes(tree))
    spared = _find_spared(path)
    names = [name for name in operator_names() if not get_operator(name).arguments()]
    for name in (*names, _CALL):
        operator = _make_operator(name)
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(positions):
            if not any(first <= start <= last for first, last in spared):
                yield name, occurrence, start


def _find_spared(path: str) -> list[tuple[Position, Position]]:
    """Return the stretches in which a change has no effect that a test could see.

    Nothing evaluates annotations. `frozen` and `slots` of a dataclass guard against misuse.
    """
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(_read(path))):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
        if isinstance(node, ast.ClassDef):
            found += node.decorator_list
    return [
        ((n.lineno, max(0, n.col_offset - 1)), (n.end_lineno or n.lineno, n.end_col_offset or 0))
        for n in found
        if n is not None
    ]


def _build_mutant(path: str, operator: str, occurrence: int, start: Position) -> Mutant | None:
    """Return the mutant, or None where the operator changes nothing that Python sees."""
    source = _read(path)
    mutated = mutate_code(source, _make_operator(operator), occurrence)
    if mutated is None or _dump(mutated) in (None, _dump(source)):
        return None
    line = start[0]
    before, after = source.splitlines()[line - 1], ([*mutated.splitlines(), ""])[line - 1]
    digest = sha256(source.encode()).hexdigest()[:12]
    return Mutant(path, operator, occurrence, line, before.strip(), after.strip(), digest)


def _dump(source: str) -> str | None:
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return None
