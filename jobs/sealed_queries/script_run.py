"""Running the script of a job, from its own place or from the deployed copy.

A script that runs from its copy takes itself to lie in the checkout, and so do the modules of the
copy. What they read and write beside themselves is there, whichever code runs.
"""

import linecache
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


def run_script(script: Path, place: Path, arguments: Sequence[str]) -> None:
    """Run a script as Python would.

    Args:
        script: the file, beside the modules that it imports.
        place: where the script takes itself to lie, such as by `__file__`.
        arguments: of the script.

    Raises:
        SystemExit: the script has ended with it.
    """
    before = sys.argv, sys.path[:]
    sys.argv = [str(place), *arguments]
    sys.path.insert(0, str(script.absolute().parent))
    try:
        if place == script:
            runpy.run_path(str(script), run_name="__main__")
        else:
            _run_copy(script, place)
    finally:
        sys.argv, sys.path[:] = before[0], before[1]


def _run_copy(script: Path, place: Path) -> None:
    """Run a script and its modules as if they lay elsewhere."""
    copies, checkout = script.absolute().parent, place.absolute().parent
    # At the end, for modules that are imported by a computed name: they are in no copy.
    sys.path.append(str(checkout))
    text = decode_source(script.read_bytes())
    # A traceback shows these lines, and not those of the file that lies there now.
    linecache.cache[str(place)] = (len(text), None, text.splitlines(keepends=True), str(place))
    module, before = ModuleType("__main__"), sys.modules["__main__"]
    module.__file__ = str(place)
    finder = _CopyFinder(copies, checkout)
    with ExitStack() as patches, _send_copies(copies, checkout):
        sys.meta_path.insert(0, finder)
        patches.callback(sys.meta_path.remove, finder)
        sys.modules["__main__"] = module
        patches.callback(sys.modules.__setitem__, "__main__", before)
        exec(compile(text, str(place), "exec", dont_inherit=True), module.__dict__)  # noqa: S102


class _CopyFinder(MetaPathFinder):
    """Finds the modules of a copy, each with the place of its file in the checkout."""

    def __init__(self, copies: Path, checkout: Path) -> None:
        self._copies, self._checkout = copies, checkout

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> ModuleSpec | None:
        """Return how to import a module; None if it is not in the copy."""
        folder = Path(*fullname.split("."))
        for file in (folder / "__init__.py", folder.with_suffix(".py")):
            if (self._copies / file).is_file():
                place = self._checkout / file
                loader = _CopyLoader(self._copies / file, place)
                within = [str(place.parent)] if file.name == "__init__.py" else None
                return spec_from_file_location(
                    fullname, place, loader=loader, submodule_search_locations=within
                )
        return None


class _CopyLoader(SourceLoader):
    """Runs the code of one file as that of another one."""

    def __init__(self, copy: Path, place: Path) -> None:
        self._copy, self._place = copy, place

    def get_filename(self, _fullname: str) -> str:
        """Return the place that the module has."""
        return str(self._place)

    def get_data(self, path: str) -> bytes:
        """Return the code; data of a package is that of the checkout."""
        return (self._copy if path == str(self._place) else Path(path)).read_bytes()


@contextmanager
def _send_copies(copies: Path, checkout: Path) -> Iterator[None]:
    """Let `addPyFile` send the module of the copy where it is given that of the checkout."""
    from pyspark import SparkContext

    context: Any = SparkContext
    add = context.addPyFile

    def add_py_file(self: Any, path: str) -> None:
        """Send a module to the executors."""
        given = Path(path).absolute()
        copy = copies / given.relative_to(checkout) if given.is_relative_to(checkout) else given
        add(self, str(copy) if copy.is_file() else path)

    context.addPyFile = add_py_file
    try:
        yield
    finally:
        context.addPyFile = add
