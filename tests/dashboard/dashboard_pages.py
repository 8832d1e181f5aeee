"""What the browser tests read off the dashboard, and whom they let judge it."""

from __future__ import annotations

from typing import Any

STEADY = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")


def say(page: Any, text: str) -> None:
    page.fill("#chat-input", text)
    page.press("#chat-input", "Enter")


def last_answer(page: Any) -> Any:
    return page.locator(".message.assistant").last


def set_parameters(page: Any, **values: str) -> None:
    if not page.locator(".settings").evaluate("node => node.open"):
        page.click(".settings summary")
    for name, value in values.items():
        page.fill(f"#chat-{name.replace('_', '-')}", value)


def no_sideways_scroll(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def background(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def grave_issues(page: Any, axe: str) -> list[str]:
    """What axe-core calls serious or critical, one line each."""
    page.evaluate(axe)
    violations = page.evaluate("axe.run().then(result => result.violations)")
    return [
        f"{violation['id']}: {node['html'][:200]} {node.get('failureSummary', '')}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def choose_theme(page: Any, theme: str) -> None:
    button = page.locator("#theme-button")
    for _ in range(3):
        if button.get_attribute("aria-label") == f"Theme: {theme}":
            return
        button.click()
    raise AssertionError(f"no theme {theme}")
