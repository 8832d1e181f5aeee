"""The dashboard on a server with keys, behind a proxy's path prefix; reloads and deaths of its worker."""

from __future__ import annotations

import os
import signal
from typing import Any
from urllib.parse import urlsplit

import pytest
from dashboard_pages import grave_issues, last_answer, say
from support.client import Client
from support.server import Serve, Server, wait_until

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
expect = sync_api.expect

PREFIX = "/deep/prefix"
FLAGS = ("--api-key", "ada:secret-a", "--api-key", "bob:secret-b", "--root-path", PREFIX)
UNAUTHORIZED = ("401",)


@pytest.fixture
def server(serve: Serve) -> Server:
    found = serve("plain", *FLAGS, key="secret-a")
    wait_until(lambda: found.client.get("/ready").status_code == 200, 30, "a worker")
    return found


@pytest.fixture
def open_prefixed(server: Server, browser: Any, open_page: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens the page below the prefix, which is taken off on the way, as a proxy would."""
    make_context = browser.new_context

    def new_context(**options: Any) -> Any:
        context = make_context(**options)
        origin = f"http://{urlsplit(server.url).netloc}"

        def strip(route: Any) -> None:
            path = urlsplit(route.request.url).path
            assert path.startswith(PREFIX + "/"), f"outside of the prefix: {path}"
            route.continue_(url=origin + path.removeprefix(PREFIX))

        context.route("**/*", strip)
        return context

    monkeypatch.setattr(browser, "new_context", new_context)
    address = f"http://{urlsplit(server.url).netloc}{PREFIX}/"
    return lambda **options: open_page(address, allow=UNAUTHORIZED, **options)


def give_key(page: Any, key: str) -> None:
    page.fill("#key-input", key)
    page.click("#key-submit")


def test_the_key_is_asked_for_and_kept_in_the_tab(server: Server, open_prefixed: Any, axe: str) -> None:
    page = open_prefixed()
    expect(page.locator("#key-dialog")).to_be_visible()
    expect(page.locator("#key-input")).to_be_focused()
    expect(page.locator("#engine-status")).to_have_text("key needed")
    assert grave_issues(page, axe) == []
    give_key(page, "wrong")
    expect(page.locator("#key-error")).to_have_text("The server does not know this key.")
    page.keyboard.press("Escape")
    expect(page.locator("#key-dialog")).to_be_visible()
    with page.expect_request("**/v1/status/events") as feed:
        give_key(page, "secret-a")
    assert feed.value.header_value("authorization") == "Bearer secret-a"
    expect(page.locator("#key-dialog")).to_be_hidden()
    expect(page.locator("#engine-status")).to_have_text("ready")
    assert page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]") == [
        '{"headrace-key":"secret-a"}',
        "{}",
        "",
    ]
    assert "secret" not in page.url
    say(page, "<|s05|>")
    expect(last_answer(page).locator("> .text")).to_have_text("ABCDEFGH")
    page.reload()
    expect(page.locator("#engine-status")).to_have_text("ready")
    expect(page.locator("#key-dialog")).to_be_hidden()
    page.click("#key-button")
    expect(page.locator("#key-dialog")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_others_requests_are_counted_not_shown(server: Server, open_prefixed: Any) -> None:
    page = open_prefixed()
    give_key(page, "secret-a")
    bob = Client(server.url, "m", "secret-b")
    with bob.streaming("<|s01|>") as chunks:
        next(chunks)
        expect(page.locator("#requests-note")).to_have_text("1 of other keys not shown")
        expect(page.locator("#request-rows tr")).to_have_count(0)
        with server.client.streaming("<|s01|>") as own:
            next(own)
            expect(page.locator("#request-rows tr")).to_have_count(1)
            expect(page.locator("#requests-note")).to_have_text("1 · 1 of other keys not shown")
    bob.close()
    server.wait_idle()


def test_the_curl_command_holds_no_key(open_prefixed: Any) -> None:
    page = open_prefixed(permissions=["clipboard-read", "clipboard-write"])
    give_key(page, "secret-a")
    expect(page.locator("#engine-status")).to_have_text("ready")
    page.click("#chat-curl")
    expect(page.locator("#chat-curl")).to_have_text("Copied")
    command = page.evaluate("navigator.clipboard.readText()")
    assert f"{PREFIX}/v1/chat/completions" in command
    assert "secret" not in command and "$HEADRACE_API_KEY" in command


def test_reload_and_death_of_the_worker_are_shown(server: Server, open_prefixed: Any) -> None:
    page = open_prefixed()
    give_key(page, "secret-a")
    facts, events = page.locator("#worker-facts"), page.locator("#worker-events")
    expect(facts).to_contain_text(f"pid {server.worker_pid}")
    page.get_by_role("button", name="Reload m").click()
    page.click("#confirm-yes")
    expect(page.locator("#models-outcome")).to_have_text("m was reloaded.", timeout=40_000)
    expect(facts).to_contain_text("Reloads1")
    expect(events).to_contain_text("worker replaced by a reload")

    with server.client.streaming("<|s01|>", max_tokens=600) as chunks:
        text = next(chunks)["choices"][0]["delta"].get("content") or ""
        old = server.worker_pid
        os.kill(old, signal.SIGKILL)
        expect(page.locator("#banner")).to_contain_text("The worker is being replaced")
        expect(events).to_contain_text("worker died")
        expect(facts).to_contain_text("Restarts1")
        expect(page.locator("#engine-status")).to_have_text("ready", timeout=40_000)
        expect(page.locator("#banner")).to_be_hidden()
        assert server.worker_pid != old
        expect(facts).to_contain_text(f"pid {server.worker_pid}")
        for chunk in chunks:
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    assert text.startswith(" one two three") and text.count("one") == 100
    server.wait_idle()
