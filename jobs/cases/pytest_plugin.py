"""Test cases of pipelines in pytest (docs/pipeline-tests.md).

With the option `tidegate_specs` in pytest's configuration, each case of these specs is a test. The
fixture `tidegate_case` runs one case in a test of one's own. Every pytest that has tidegate beside
it loads this module, so it imports nothing else of tidegate until a case is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tidegate.jobs.cases.case_report import CaseResult


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the configuration."""
    parser.addini("tidegate_specs", "specs of pipelines whose cases are tests", type="args")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a case of one of the specs."""
    if file_path.suffix != ".yaml":
        return None
    for given in parent.config.getini("tidegate_specs"):
        spec = parent.config.rootpath / given
        if spec.parent / "cases" / spec.stem in file_path.parents:
            return CaseFile.from_parent(parent, path=file_path, spec=spec)
    return None


class CaseFile(pytest.File):
    """A file with a case.

    Attributes:
        spec: path of the spec.
    """

    def __init__(self, *, spec: Path, **fields: Any) -> None:
        super().__init__(**fields)
        self.spec = spec

    def collect(self) -> Iterator[pytest.Item]:
        """Return the only test of the file."""
        yield CaseItem.from_parent(self, name=self.path.stem, spec=self.spec)


class CaseItem(pytest.Item):
    """The test that a case passes."""

    def __init__(self, *, spec: Path, **fields: Any) -> None:
        super().__init__(**fields)
        self._spec_path = spec

    def runtest(self) -> None:
        """Run the case.

        Raises:
            AssertionError: it does not pass.
        """
        require_passed(check_case(self._spec_path, self.path))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """Return what differs, without a traceback."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return where the test is."""
        return self.path, 0, self.name


def check_case(spec_path: str | Path, case: str | Path) -> CaseResult:
    """Run a case of a spec in this process.

    Raises:
        ConfigurationError: the spec is wrong, or its pipeline needs Spark.
    """
    from tidegate.jobs.cases.case_check import open_runner
    from tidegate.jobs.spec.loader import load_spec
    from tidegate.jobs.spec.user_code import allow_imports

    allow_imports(Path(spec_path).absolute().parent)
    with open_runner(load_spec(spec_path)) as runner:
        return runner.check_case(Path(case))


def require_passed(result: CaseResult) -> None:
    """Fail for a case that does not pass.

    Raises:
        AssertionError: with what differs.
    """
    if result.verdict != "passed":
        raise AssertionError("\n".join([f"{result.case}: {result.verdict}", *result.problems]))


@pytest.fixture
def tidegate_case() -> Callable[[str | Path, str | Path], None]:
    """Run a case of a spec: `tidegate_case("orders.yaml", "cases/orders/late.yaml")`."""

    def run_case(spec: str | Path, case: str | Path) -> None:
        require_passed(check_case(spec, case))

    return run_case
