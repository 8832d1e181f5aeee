"""The dashboard in a browser, on a server without keys: figures, chat, cancelling, themes, phones, hostility."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
from dashboard_pages import (
    STEADY,
    background,
    choose_theme,
    grave_issues,
    last_answer,
    no_sideways_scroll,
    say,
    set_parameters,
)
from support.scripted import expected_text
from support.server import Serve, Server, wait_until

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
expect = sync_api.expect

TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
HOSTILE = "<img src=x onerror=window.hit=1><script>window.hit=1</script><svg onload=window.hit=1>"


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve("plain", *STEADY)


def chart_value(page: Any, title: str) -> Any:
    return page.locator(".chart").filter(has_text=title).locator(".now")


def positive(unit: str) -> re.Pattern[str]:
    return re.compile(rf"[1-9][\d.,]*{unit}")


def test_figures_are_live(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    expect(page.locator("#engine-status")).to_have_text("ready")
    expect(page.locator("#model-name")).to_have_text("m")
    expect(page).to_have_title("m · Headrace")
    expect(page.locator("#requests-empty")).to_be_visible()
    expect(page.locator("#memory-body")).to_contain_text("KV pool256 MiB")
    expect(page.locator("#worker-facts")).to_contain_text(f"pid {server.worker_pid}")
    expect(page.locator("#worker-facts")).to_contain_text("Restarts0")
    with server.client.streaming("<|s01|>") as chunks:
        next(chunks)
        row = page.locator("#request-rows tr")
        expect(row).to_have_count(1)
        expect(row).to_contain_text("/v1/chat/completions · m")
        expect(row).to_contain_text("decode")
        expect(chart_value(page, "Output tokens")).to_have_text(positive("tok/s"))
        output = row.locator("td").nth(3)
        before = output.inner_text()
        expect(output).not_to_have_text(before)
        expect(chart_value(page, "Time between tokens")).to_have_text(positive("m?s"))
        expect(page.locator("#kv-body")).to_contain_text(re.compile("Held[1-9]"))
    expect(page.locator("#request-rows tr")).to_have_count(0)
    server.wait_idle()


def test_chat(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "<|s05|>")
    answer = last_answer(page)
    expect(answer.locator(".foot")).to_contain_text("stop · 4 prompt")
    expect(answer.locator("> .text")).to_have_text("ABCDEFGH")
    expect(page.locator("#chat-send")).to_be_visible()
    expect(page.locator("#chat-said")).to_have_text("The answer has ended: stop.")
    page.click("#chat-clear")
    expect(page.locator(".message")).to_have_count(0)


def test_thinking_is_folded_and_calls_are_shown(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "<|s03|>")
    answer = last_answer(page)
    expect(answer.locator("> .text")).to_have_text("42")
    thought = answer.locator(".thinking .text")
    expect(thought).to_be_hidden()
    answer.locator(".thinking summary").click()
    expect(thought).to_have_text("plan it")
    page.click("#chat-clear")
    set_parameters(page, tools=TOOLS)
    say(page, "<|s04|>")
    answer = last_answer(page)
    expect(answer.locator(".foot")).to_contain_text("tool_calls")
    expect(answer.locator("> .text")).to_have_text("Sure.")
    expect(answer.locator(".call code")).to_have_text("add")
    assert json.loads(answer.locator(".call pre").inner_text()) == {"a": 1, "s": "é\n"}


def test_stop_ends_the_request(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "<|s01|>")
    answer = last_answer(page)
    expect(answer.locator("> .text")).to_contain_text("one two three four five six one")
    page.click("#chat-stop")
    expect(answer.locator(".foot")).to_contain_text("stopped")
    text = answer.locator("> .text").text_content()
    assert expected_text("s01", 8000).startswith(text)
    server.wait_idle()
    expect(page.locator("#chat-input")).to_be_focused()


def test_cancel_a_running_request(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    with server.client.streaming("<|s01|>") as chunks:
        request_id = next(chunks)["id"]
        page.get_by_role("button", name=f"Cancel {request_id}").click()
        finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert finishes[-1] == "abort"
    expect(page.locator("#requests-outcome")).to_have_text(f"{request_id} was cancelled.")
    expect(page.locator("#request-rows tr")).to_have_count(0)
    server.wait_idle()


def test_parameters_and_curl(server: Server, open_page: Any) -> None:
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    set_parameters(page, system="It's short.", temperature="0.5", top_p="0.9", max_tokens="3", seed="7")
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "it's <|s05|>")
    body = sent.value.post_data_json
    expect(last_answer(page).locator(".foot")).to_contain_text("length")
    numbers = {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")}
    assert numbers == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 3, "seed": 7}
    assert body["messages"] == [
        {"role": "system", "content": "It's short."},
        {"role": "user", "content": "it's <|s05|>"},
    ]
    page.click("#chat-curl")
    expect(page.locator("#chat-curl")).to_have_text("Copied")
    words = shlex.split(page.evaluate("navigator.clipboard.readText()").replace("\\\n", ""))
    assert words[:3] == ["curl", "-N", f"{server.url}/v1/chat/completions"]
    assert words[3:5] == ["-H", "Content-Type: application/json"]
    assert json.loads(words[words.index("-d") + 1]) == body
    set_parameters(page, tools="{")
    say(page, "x")
    expect(last_answer(page).locator(".failure")).to_have_text("the tools are not JSON")


def test_refusals_are_told(server: Server, open_page: Any) -> None:
    page = open_page(server.url, allow=("400",))
    set_parameters(page, temperature="-1")
    say(page, "<|s05|>")
    expect(last_answer(page).locator(".failure")).to_contain_text("temperature")
    expect(page.locator("#chat-send")).to_be_visible()


def test_hostile_text_is_inert(server: Server, open_page: Any) -> None:
    page = open_page(server.url, allow=("the tools",))
    delta = {"content": HOSTILE, "reasoning_content": HOSTILE}
    calls = [{"index": 0, "id": "c", "function": {"name": HOSTILE, "arguments": HOSTILE}}]
    chunks = [{"choices": [{"index": 0, "delta": {**delta, "tool_calls": calls}, "finish_reason": HOSTILE}]}]
    chunks.append({"error": {"message": HOSTILE}})
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream")
    )
    say(page, HOSTILE)
    answer = last_answer(page)
    for part in ("> .text", ".failure", ".call code", ".call pre"):
        expect(answer.locator(part)).to_have_text(HOSTILE)
    expect(page.locator(".message.user .text")).to_have_text(HOSTILE)

    status = page.evaluate(
        """async () => {
            const reader = (await fetch("v1/status/events")).body.pipeThrough(new TextDecoderStream()).getReader();
            let text = "";
            while (!text.includes("event: requests")) text += (await reader.read()).value;
            reader.cancel();
            return text.split("event: status\\ndata: ")[1].split("\\n")[0];
        }"""
    )
    body = json.loads(status)
    for name in ("message", "detail", "device", "attention"):
        body["engine"][name] = HOSTILE
    body["engine"]["status"] = "restarting"
    body["models"][0] |= {"names": [HOSTILE], "message": HOSTILE, "role": HOSTILE}
    body["memory"] |= {"pressure": HOSTILE, "planned_bytes": {HOSTILE: 5, "budget": 5}}
    body["memory"]["kv_blocks"] = [body["memory"]["kv_blocks"][0] | {"group": HOSTILE}] * 2
    entry = {
        "id": HOSTILE, "phase": HOSTILE, "route": HOSTILE, "model": HOSTILE, "prompt_tokens": 1, "age_s": 1,
        "cached_tokens": 1, "output_tokens": 1, "max_output_tokens": 1, "sequences": 2,
    }  # fmt: skip
    requests = {"total": 1, "own_only": False, "requests": [entry]}
    events = f"event: status\ndata: {json.dumps(body)}\n\nevent: requests\ndata: {json.dumps(requests)}\n\n"
    history = f"event: history\ndata: {json.dumps({'points': [body['point']]})}\n\n"
    page.route(
        "**/v1/status/events", lambda route: route.fulfill(body=history + events, content_type="text/event-stream")
    )
    page.reload()
    expect(page.locator("#request-rows .id")).to_have_text(HOSTILE)
    expect(page.locator("#worker-facts")).to_contain_text(HOSTILE)
    expect(page.locator("#model-list strong")).to_have_text(HOSTILE)
    assert page.evaluate("window.hit") is None
    assert page.locator("img").count() == 1 and page.locator("main script, main img, #chat-log svg").count() == 0


def test_inline_scripts_and_styles_are_blocked(server: Server, open_page: Any) -> None:
    page = open_page(server.url, allow=("Content Security Policy",))
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.hit = 1";
            const style = document.createElement("style");
            style.textContent = "body { background: rgb(1, 2, 3) !important; }";
            document.body.append(script, style);
        }"""
    )
    assert page.evaluate("window.hit") is None
    assert background(page) != "rgb(1, 2, 3)"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes_are_accessible(server: Server, open_page: Any, axe: str, theme: str) -> None:
    page = open_page(server.url, color_scheme=theme)
    say(page, "<|s03|>")
    expect(last_answer(page).locator(".foot")).to_contain_text("stop")
    set_parameters(page)
    with server.client.streaming("<|s01|>") as chunks:
        next(chunks)
        expect(page.locator("#request-rows tr")).to_have_count(1)
        assert grave_issues(page, axe) == []
        page.get_by_role("button", name="Reload m").click()
        expect(page.locator("#confirm-dialog")).to_be_visible()
        assert grave_issues(page, axe) == []
        page.click("#confirm-no")
    server.wait_idle()


def test_theme_follows_the_system_until_chosen(server: Server, open_page: Any) -> None:
    page = open_page(server.url, color_scheme="light")
    light = background(page)
    page.emulate_media(color_scheme="dark")
    dark = background(page)
    assert light != dark
    choose_theme(page, "light")
    assert background(page) == light
    page.reload()
    assert background(page) == light
    choose_theme(page, "dark")
    page.emulate_media(color_scheme="light")
    assert background(page) == dark


def test_phone(server: Server, open_page: Any, axe: str) -> None:
    page = open_page(server.url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    set_parameters(page, max_tokens="5")
    say(page, "x" * 300 + "<|s05|>")
    expect(last_answer(page).locator(".foot")).to_contain_text("length")
    with server.client.streaming("<|s01|>") as chunks:
        next(chunks)
        expect(page.locator("#request-rows tr")).to_have_count(1)
        assert no_sideways_scroll(page)
        assert grave_issues(page, axe) == []
        page.get_by_role("button", name="Cancel").tap()
        expect(page.locator("#request-rows tr")).to_have_count(0)
    page.get_by_role("link", name="Memory", exact=True).tap()
    expect(page.locator("#memory-title")).to_be_in_viewport()
    page.set_viewport_size({"width": 320, "height": 600})
    assert no_sideways_scroll(page)


def test_keyboard(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the chat")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#chat-input")).to_be_focused()
    page.keyboard.type("<|s01|>")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Tab")
    expect(page.locator("#chat-send")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#chat-stop")).to_be_focused()
    expect(last_answer(page).locator("> .text")).to_contain_text("one two")
    page.keyboard.press("Enter")
    expect(last_answer(page).locator(".foot")).to_contain_text("stopped")
    server.wait_idle()


def test_a_lost_connection_is_told_and_found_again(server: Server, open_page: Any) -> None:
    page = open_page(server.url, allow=("ERR_FAILED",))
    expect(page.locator("#engine-status")).to_have_text("ready")
    page.route("**/v1/status/events", lambda route: route.abort())
    page.reload()
    expect(page.locator("#engine-status")).to_have_text("not connected")
    expect(page.locator("#banner")).to_contain_text("Trying again")
    page.unroute("**/v1/status/events")
    expect(page.locator("#engine-status")).to_have_text("ready")
    expect(page.locator("#banner")).to_be_hidden()


def test_leaving_the_page_ends_its_stream(server: Server, open_page: Any) -> None:
    page = open_page(server.url)
    expect(page.locator("#engine-status")).to_have_text("ready")
    page.close()
    wait_until(lambda: "GET /v1/status/events" in server.log(), 20, "the stream to end")
