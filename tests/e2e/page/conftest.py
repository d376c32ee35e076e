"""The gallery of streams on a server of its own, and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.e2e.browser import PATIENCE, strange_requests
from tests.e2e.page.streams_page import Open, Site
from tests.operators.history import GALLERY, gallery
from tests.operators.pages import FakeAirflowQueries, app_of, served
from tests.servers.memory_store import Fault, MemoryStore, StoreRequest
from tidegate.operators import page_data


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Seven streams in all states, on a store that can be taken away."""

    store = MemoryStore()

    def hook(request: StoreRequest) -> Fault | None:
        return found.fault

    # The page has a client of its own: what it cannot reach, the drivers go on with.
    desk = FakeAirflowQueries(GALLERY, MemoryStore(store.bucket, hook=hook), paused=["orders"])
    found = Site("", gallery(store, 90), desk, store)
    with pytest.MonkeyPatch.context() as patch:
        # The gallery seals nothing more, so on a busy machine its stream that is well would age.
        patch.setattr(page_data, "OLD_CHECKPOINT_SECONDS", 86_400.0)
        with served(app_of(desk)) as url:
            found.url = f"{url}/page"
            yield found


@pytest.fixture
def show(chromium: Browser, site: Site) -> Iterator[Open]:
    """Opens a page in a window of its own and fails when anything on it went wrong."""
    contexts, strange = [], []

    def open_page(
        fragment: str = "", *, width: int = 1280, scheme: str = "light", quiet: bool = True
    ) -> Page:
        look: dict[str, Any] = {
            "color_scheme": scheme,
            "reduced_motion": "reduce",
        }  # or colours are caught between two
        context = chromium.new_context(viewport={"width": width, "height": 844}, **look)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        if quiet:
            strange.append(strange_requests(page, site.url.removesuffix("/page")))
        page.goto(site.url + fragment)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [found for part in strange for found in part] == []
