"""A headless Chromium, and pages of it that complain about whatever a page of ours must not do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

OpenPage = Callable[..., Any]
PATIENCE_MS = 30_000
"""For anything to appear; a hang is longer, also on a busy machine."""
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Of a module only: while Playwright's blocking interface is in use, no test can run an event loop."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser is installed ({', '.join(NAMES)})")
    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """``open_page(url, allow=(), **context)``: a page that has loaded ``url``.

    At the test's end it must have asked nobody else for anything, and have logged no error, but for those that
    contain a text of ``allow``.
    """
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_one(url: str, allow: tuple[str, ...] = (), **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        host = urlsplit(url).netloc

        def complain(text: str) -> None:
            if not any(allowed in text for allowed in allow):
                complaints.append(text)

        page.on("console", lambda message: message.type in ("error", "warning") and complain(message.text))
        page.on("pageerror", lambda error: complain(str(error)))
        page.on("request", lambda request: urlsplit(request.url).netloc != host and complain(request.url))
        response = page.goto(url)
        assert response.status == 200
        assert "default-src 'none'" in response.headers["content-security-policy"]
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    package = pytest.importorskip(
        "axe_playwright_python", reason="the package axe-playwright-python is not installed"
    )
    return (Path(package.__path__[0]) / "axe.min.js").read_text()
