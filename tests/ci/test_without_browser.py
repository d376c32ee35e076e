"""What becomes of browser tests where there is no browser."""

from __future__ import annotations

import pytest

from tests.e2e import browser


def test_only_ci_insists_on_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person without one can run the other tests."""
    monkeypatch.delenv("CI", raising=False)
    assert browser.may_skip(None)
    assert not browser.may_skip("/usr/bin/chromium")
    monkeypatch.setenv("CI", "true")
    assert not browser.may_skip(None)


def test_a_test_that_is_not_skipped_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of an error of the library that drives the browser."""
    monkeypatch.setattr(browser, "CHROMIUM", None)
    with pytest.raises(AssertionError, match="apt-get install chromium"):
        browser.browser_of_the_machine().__enter__()
