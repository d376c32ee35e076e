"""The user's own code that a spec names: the script of a job, and the modules of reducers.

Only code that lies beside the spec or the script counts. Installed packages belong to the Python
that runs the driver. Imports are found by reading the code; nothing is executed.
"""

import ast
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import SequenceMatcher
from importlib import import_module
from pathlib import Path

from .job_spec import JobSpec, SupervisedSpec


def find_script(spec: JobSpec, spec_path: Path) -> Path | None:
    """Return the script: relative to the working folder, or to the folder of the spec."""
    folders = (Path.cwd(), spec_path.absolute().parent)
    return next((folder / spec.app for folder in folders if (folder / spec.app).is_file()), None)


def find_code_folder(spec: SupervisedSpec, spec_path: Path) -> Path:
    """Return the folder whose code counts: that of the script, or of the spec of a pipeline."""
    folder = spec_path.absolute().parent
    if not isinstance(spec, JobSpec):
        return folder
    if script := find_script(spec, spec_path):
        return script.absolute().parent
    # The script has gone; its folder may have stayed.
    places = [(one / spec.app).parent for one in (folder, Path.cwd())]
    return next((place for place in places if place.is_dir()), folder)


def collect_code(spec: SupervisedSpec, spec_path: Path) -> dict[str, str]:
    """Return the text of each file of code that the spec needs, by its path in the code's folder.

    Files that are not there or are no UTF-8 are left out.
    """
    folder = find_code_folder(spec, spec_path)
    texts: dict[str, str] = {}
    for file in sorted(_list_imported_files(spec, folder)):
        with suppress(OSError, UnicodeDecodeError):
            texts[file.relative_to(folder).as_posix()] = file.read_text("utf-8")
    return texts


def collect_module_code(modules: Iterable[str]) -> tuple[dict[str, bytes], list[Path]]:
    """Return the files of some modules, and of those that they import, by their paths.

    Packages that are installed are left out, and modules without Python source, such as compiled
    ones. So are files that are not what this process has imported under their name.

    Returns:
        The files, and the folders in which Python has found the modules.
    """
    files: dict[str, bytes] = {}
    folders: list[Path] = []
    for name in modules:
        file = Path(getattr(import_module(name), "__file__", None) or "")
        if file.suffix != ".py" or _is_installed(file):
            continue
        folder = file.parents[name.count(".") + (file.name == "__init__.py")]
        if any(folder.glob("*.dist-info")):  # of `pip install --target`
            continue
        if folder not in folders:
            folders.append(folder)
        for own in sorted(_follow_imports(folder, _find_module_files(folder, name))):
            path = own.relative_to(folder)
            parts = path.parts[:-1] if own.name == "__init__.py" else path.with_suffix("").parts
            loaded = sys.modules.get(".".join(parts))
            # A module of another folder, as of the standard library, may hide this one.
            if loaded is None or getattr(loaded, "__file__", None) == str(own):
                files[path.as_posix()] = own.read_bytes()
    return files, folders


def _is_installed(file: Path) -> bool:
    """Whether a file belongs to Python or to a package that was installed."""
    if any(file.is_relative_to(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")):
        return True
    return any(folder.name in ("site-packages", "dist-packages") for folder in file.parents)


def describe_code_change(before: str | None, after: str | None) -> str:
    """Return how a file of code changed: added, removed, or its lines added and removed."""
    if before is None or after is None:
        return "added" if before is None else "removed"
    matcher = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    changes = [block for block in matcher.get_opcodes() if block[0] != "equal"]
    removed = sum(end - start for _, start, end, _, _ in changes)
    added = sum(end - start for _, _, _, start, end in changes)
    return f"{added} lines added, {removed} removed"


def allow_imports(folder: Path) -> None:
    """Let modules in a folder be imported from now on, here and in Spark's tasks."""
    place = str(folder)
    if place not in sys.path:
        sys.path.append(place)
        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (others, place)))


def write_code(code: Mapping[str, str], folder: Path) -> None:
    """Write files of code, as `collect_code` returns them, into a folder."""
    for name, text in code.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")


def link_other_files(checkout: Path, folder: Path, *, with_modules: bool) -> None:
    """Link what lies beside code in a checkout, such as data, to the same place beside its copy.

    Args:
        checkout: the folder with the code. It may have gone.
        folder: with the copy.
        with_modules: link modules and packages at the top of the folder too.
    """
    try:
        others = list(checkout.iterdir())
    except OSError:
        return
    for other in others:
        place = folder / other.name
        is_module = other.suffix == ".py" or (other / "__init__.py").is_file()
        if place.is_dir() and not place.is_symlink():
            link_other_files(other, place, with_modules=True)
        elif os.path.lexists(place) or (is_module and not with_modules):
            continue
        # What Python has compiled of the checkout must not be taken for the copy's.
        elif other.name != "__pycache__":
            place.symlink_to(other)


def _list_imported_files(spec: SupervisedSpec, folder: Path) -> set[Path]:
    """The files in the folder that the script or the reducers import, directly or not."""
    if isinstance(spec, JobSpec):
        pending = [folder / Path(spec.app).name]
    else:
        names = [one.function.partition(":")[0] for one in spec.reducers.values() if one.function]
        pending = [file for name in names for file in _find_module_files(folder, name)]
    return _follow_imports(folder, pending)


def _follow_imports(folder: Path, files: Iterable[Path]) -> set[Path]:
    """Return files, and those in the folder that they import, directly or not."""
    found, pending = set[Path](), list(files)
    while pending:
        file = pending.pop()
        if file not in found:
            found.add(file)
            pending += _iterate_imports(folder, file)
    return found


def _iterate_imports(folder: Path, file: Path) -> Iterator[Path]:
    """The files in the folder that one file imports. What Python cannot read imports nothing."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    package = file.relative_to(folder).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                yield from _find_module_files(folder, one.name)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            for one in node.names:
                # The name may be that of a module or of something in it.
                yield from _find_module_files(folder, f"{base}.{one.name}".strip("."))


def _find_module_files(folder: Path, name: str) -> Iterator[Path]:
    """The files of a module and of the packages around it, as far as they lie in the folder."""
    place = folder
    for part in name.split("."):
        place = place / part
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file
