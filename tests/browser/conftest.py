# SPDX-License-Identifier: Apache-2.0
"""A Chromium for the tests of the page, and pages in it that must behave."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.settings import Settings
from tests.sidecar.builders import NOW, write
from tests.sidecar.engine import fake_engine
from tests.sidecar.serving import serving

Open = Callable[..., AbstractContextManager[Page]]

_SWITCHES = (
    # A container has no user namespace for Chromium's sandbox; it only ever sees this project's page.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Chromium reports every answer that is not 2xx; 503 of a probe and 404 of what is not there are meant.
_EXPECTED = re.compile(r"Failed to load resource: (the server responded with a status|net::ERR_)")


# A package's, not a session's: playwright keeps an event loop in this thread, which asyncio.run of tests
# elsewhere would refuse to share.
@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """A headless Chromium of this machine; without one these tests are skipped, but not where CI runs."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        why = "no Chromium on this machine; run scripts/programs (Debian: apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_SWITCHES))
        yield browser
        browser.close()


@pytest.fixture
def look(chromium: Browser) -> Open:
    """Opens a page; at its end it must not have erred, nor asked anybody but its own server."""

    @contextlib.contextmanager
    def opened(url: str, *, width: int = 1280, **settings: Any) -> Iterator[Page]:
        context = chromium.new_context(viewport={"width": width, "height": 844}, **settings)
        page = context.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda said: (
                wrong.append(said.text)
                if said.type in ("error", "warning") and not _EXPECTED.match(said.text)
                else None
            ),
        )
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((url, "data:")) else wrong.append(f"asked {asked.url}")
            ),
        )
        page.goto(url)
        yield page
        context.close()
        assert wrong == []

    return opened


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Callable[[Journal], str]]:
    """Writes a journal and answers the URL of a real sidecar over it, whose engine is healthy."""
    settings = Settings(state_dir=tmp_path, poll_seconds=0.1)
    with fake_engine() as engine, serving(create_app(settings, clock=lambda: NOW)) as url:

        def show(seen: Journal) -> str:
            record = seen.supervisor
            if record is not None:
                record = record.model_copy(update={"engine_url": engine.url})
            write(tmp_path, Journal(record, seen.ranks, seen.failures, seen.faults))
            return url

        yield show
