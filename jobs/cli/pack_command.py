"""`tidegate pack`: an archive of what a task needs, for executors that have no tidegate.

It is an environment of pex with the distribution `tidegate-kernel`: without Spark, which brings
PySpark along, and without Airflow and Great Expectations, which only run beside the driver.
"""

import re
import shutil
import subprocess
import sys
import tarfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

import tidegate
from tidegate.json_types import read_data_file

from . import output
from .arguments import resolve_spec_path
from .errors import CANNOT_WRITE, NO_PACKER, PACK_FAILED

_FOLDER = "tidegate-env"
"""Where executors unpack the archive, in their working folder."""


def write_executor_archive(
    spec: Annotated[str, typer.Argument(help="File of the pipeline's spec.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The archive. Default: NAME-executors.tar.gz here."),
    ] = None,
) -> None:
    """Pack what Spark's tasks need, for executors on hosts without tidegate.

    The archive has tidegate, its packages for tasks and the modules beside the spec that reducers
    name. It prints the settings that use it. Its hosts need Python of the same minor version.
    """
    from tidegate.jobs.spec.loader import load_spec
    from tidegate.jobs.spec.user_code import collect_code, write_code

    path = resolve_spec_path(spec)
    pipeline = load_spec(path)
    archive = (out or Path(f"{pipeline.name}-executors.tar.gz")).absolute()
    if not archive.parent.is_dir():  # packing takes minutes
        raise CANNOT_WRITE(file=archive, reason="its folder does not exist")
    with TemporaryDirectory(prefix="tidegate-pack-") as scratch:
        sources, packed = Path(scratch, "sources"), Path(scratch, "packed")
        write_code(collect_code(pipeline, path), sources)
        _copy_kernel(sources / "tidegate")
        _run_packer(sources, packed)
        _write_archive(packed, archive)
    size = archive.stat().st_size / 1e6
    output.print_line(f"{archive}: {size:.0f} MB. In the spec:")
    output.print_line("spark:\n  conf:")
    output.print_line(f"    spark.archives: {archive}#{_FOLDER}")
    output.print_line(f"    spark.pyspark.python: ./{_FOLDER}/__main__.py")


def _write_archive(packed: Path, archive: Path) -> None:
    """Write the archive whole, or leave no file.

    Raises:
        ConfigurationError: it cannot be written.
    """
    part = archive.with_name(f"{archive.name}.part")
    try:
        with tarfile.open(part, "w:gz", compresslevel=6) as writer:
            writer.add(packed, ".")
        part.replace(archive)
    except OSError as error:
        raise CANNOT_WRITE(file=archive, reason=error) from error
    finally:
        part.unlink(missing_ok=True)


def _copy_kernel(folder: Path) -> None:
    """Copy the files of the distribution; one that links to a checkout does not have them."""
    package = Path(tidegate.__file__).parent
    for name in read_data_file("tidegate", "kernel.toml")["files"]:
        source, copy = package / name, folder / name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)


def list_packages() -> list[str]:
    """Return what the distribution requires, in the versions that are installed here.

    Packages of extras that are not installed are left out.
    """
    found = []
    for requirement in requires("tidegate-kernel") or ():
        package = re.split(r"[<>=!~; ]", requirement)[0]
        with suppress(PackageNotFoundError):
            found.append(f"{package}=={version(package.partition('[')[0])}")
    return found


def _run_packer(sources: Path, packed: Path) -> None:
    """Let pex make an environment of these sources and of the packages that are installed here.

    Raises:
        ConfigurationError: pex is not installed, or cannot.
    """
    if find_spec("pex") is None:
        raise NO_PACKER()
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # The very files of this environment, without a registry.
    place = ["--python", sys.executable]
    if sys.prefix != sys.base_prefix:
        place = ["--venv-repository", sys.prefix]
    # Spark puts PySpark into PYTHONPATH, which counts after what is packed.
    options = ["--inherit-path=fallback", "--layout", "loose", "-D", str(sources)]
    shebang = ["--python-shebang", f"/usr/bin/env {python}"]
    command = [sys.executable, "-m", "pex", *list_packages(), *place, *options, *shebang]
    done = subprocess.run(
        [*command, "-o", str(packed)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise PACK_FAILED(cause=(done.stderr or done.stdout).strip()[-2000:])
