"""The JavaScript SDKs and Vercel's AI SDK against a real server: Node's own test runner on tests/clients/js."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from outside_tools import clean_environment, node_modules
from support.server import Serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PARSERS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")


@pytest.fixture(scope="session")
def packages() -> Path:
    return node_modules()


@pytest.mark.parametrize("name", ["openai", "anthropic", "ai-sdk"])
def test_javascript(packages: Path, serve: Serve, name: str) -> None:
    server = serve("plain", *PARSERS)
    done = subprocess.run(
        ["node", "--test", "--test-reporter=tap", f"{name}.test.mjs"],
        cwd=packages,
        env=clean_environment(HEADRACE_URL=server.url),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2000:]
    assert "# skipped 0" in done.stdout and "# pass 0" not in done.stdout, done.stdout[-2000:]
    server.wait_idle()
