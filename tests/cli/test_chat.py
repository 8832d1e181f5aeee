"""``headrace chat``: on a pseudo-terminal and in a pipe, against scripted answers and a real server."""

from __future__ import annotations

import json
import os
import pty
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_stub import Cut, running, said
from chat_terminal_driver import CHAT, HANG_S, Terminal, terminal
from support.server import Serve, wait_until

from headrace.cli.chat import choose_endpoint
from headrace.cli.chat_http import ChatFault, Endpoint
from headrace.cli.chat_session import Answer, Conversation, Delta

USAGE = {"usage": {"completion_tokens": 4}}


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Environment of a chat: a state folder of its own, no keys."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    names = ("HEADRACE_API_KEY", "OPENAI_API_KEY", "NO_COLOR")
    return {"HEADRACE_STATE": str(folder), **dict.fromkeys(names, "")}


def echo(body: dict[str, Any], number: int) -> list[dict[str, Any]]:
    return said(f"<{number}: {body['messages'][-1]['content']}>", **USAGE)


def piped(message: bytes, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*CHAT, *words], input=message, capture_output=True, timeout=HANG_S, env={**os.environ, **env}, check=False
    )


def roles(body: dict[str, Any]) -> list[str]:
    return [message["role"] for message in body["messages"]]


# -- in a pipe -----------------------------------------------------------------------------------------


def test_a_pipe_gets_the_answer_and_nothing_else(home: dict[str, str]) -> None:
    def answer(body: dict[str, Any], number: int) -> list[dict[str, Any]]:
        return [{"reasoning_content": "hm"}, *said("Grüße \x1b[1m!", **USAGE)]

    flags = ("--temperature", "0.5", "--max-tokens", "9", "--seed", "3", "--system", "Be brief", "--model", "x")
    with running(answer) as stub:
        done = piped("two\nlines ü\n".encode(), "--base-url", stub.url, *flags, "--api-key", "k", env=home)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "Grüße \x1b[1m!\n", b"")
    (body,) = stub.bodies
    assert body["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "two\nlines ü"},
    ]
    sent = {name: body[name] for name in ("model", "temperature", "max_tokens", "seed", "stream")}
    assert sent == {"model": "x", "temperature": 0.5, "max_tokens": 9, "seed": 3, "stream": True}
    assert stub.headers[0]["authorization"] == "Bearer k"
    assert stub.paths == ["/v1/chat/completions"]  # a named model is not looked up


def test_the_first_model_and_the_url_as_clients_write_it(home: dict[str, str]) -> None:
    with running(echo, models=("first", "second")) as stub:
        assert piped(b"hi", "--url", stub.url + "/v1/", env=home).stdout == b"<1: hi>\n"
        assert piped(b"hi", "--base-url", stub.url + "/deep/v1", env=home).stdout == b"<2: hi>\n"
    assert [body["model"] for body in stub.bodies] == ["first", "first"]
    assert stub.paths[3] == "/deep/v1/chat/completions"


def test_a_server_on_this_machine_gets_its_own_key_and_no_other(home: dict[str, str]) -> None:
    with running(echo) as stub:
        for env in (
            {},
            {"OPENAI_API_KEY": "theirs"},
            {"OPENAI_API_KEY": "theirs", "HEADRACE_API_KEY": "alice:ours"},
        ):
            assert piped(b"hi", "--base-url", stub.url, env={**home, **env}).returncode == 0
    sent = [headers.get("authorization") for headers in stub.headers]
    assert sent == [None, None, "Bearer ours"]  # without the name, as the server reads this variable


@pytest.mark.parametrize(
    ("url", "key"),
    [
        (None, "ours"),
        ("http://localhost:9/v1", "ours"),
        ("http://LOCALHOST", "ours"),
        ("http://127.8.7.6:9", "ours"),
        ("https://[::1]:9/v1", "ours"),
        ("https://api.openai.com/v1", "theirs"),
        ("http://127.0.0.1.example.com", "theirs"),
        ("http://localhost.example.com", "theirs"),
        ("http://127.0.0.1@example.com", "theirs"),
        ("http://192.168.1.5:8000", "theirs"),
        ("http://[2001:db8::1]:8000", "theirs"),
    ],
)
def test_which_key_of_the_environment_a_host_gets(url: str | None, key: str) -> None:
    environment = {"HEADRACE_API_KEY": "alice:ours", "OPENAI_API_KEY": "theirs"}
    values: dict[str, object] = {} if url is None else {"chat.url": url}
    assert choose_endpoint(values, environment).key == key
    assert choose_endpoint({**values, "chat.key": "flag"}, environment).key == "flag"
    del environment["HEADRACE_API_KEY" if key == "ours" else "OPENAI_API_KEY"]
    assert choose_endpoint(values, environment).key is None  # the other one does not take its place


@pytest.mark.parametrize(
    ("answer", "said_why"),
    [
        (
            (401, {"error": {"message": "no key"}}),
            "the server wants a key (no key): give --api-key, or set HEADRACE_API_KEY",
        ),
        ((404, {"detail": "Not Found"}), "/v1/chat/completions: Not Found"),
        ((429, {"error": "busy\nnow"}), "429: busy now"),
        ((500, {}), "500: "),
        ([{"content": "a"}, 'data: {"error": {"message": "it broke"}}\n\n'], "it broke"),
        (["data: [1]\n\n"], "no chat chunk"),
        ((200, {"choices": []}), "without streaming"),
    ],
)
def test_a_failure_is_one_line_and_a_one(answer: Any, said_why: str, home: dict[str, str]) -> None:
    with running(lambda body, number: answer) as stub:
        done = piped(b"hi", "--base-url", stub.url, env=home)
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("headrace chat: ") and said_why in line
    assert done.returncode == 1


def test_an_answer_that_breaks_off_is_a_failure(home: dict[str, str]) -> None:
    def answer(body: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
        yield {"content": "half"}
        raise Cut

    with running(answer) as stub:
        done = piped(b"hi", "--base-url", stub.url, env=home)
    assert (done.returncode, done.stdout) == (1, b"half\n")
    assert b"in the middle of the answer" in done.stderr and len(done.stderr.splitlines()) == 1


def test_nobody_there_and_wrong_usage(home: dict[str, str]) -> None:
    done = piped(b"hi", "--base-url", "http://127.0.0.1:9", env=home)
    assert done.returncode == 1
    assert done.stderr.startswith(b"headrace chat: http://127.0.0.1:9 does not answer (Connection refused)")
    for words, part in (
        ((), b"standard input is empty"),
        (("./models/x",), b"headrace serve MODEL"),
        (("--base-url", "ftp://x"), b"http or https URL"),
        (("--temprature", "1"), b"did you mean --temperature?"),
    ):
        done = piped(b" \n" if not words else b"hi", *words, env=home)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert part in done.stderr


def test_a_cut_answer_says_so_beside_the_output(home: dict[str, str]) -> None:
    with running(lambda body, number: said("abc", finish_reason="length")) as stub:
        done = piped(b"hi", "--base-url", stub.url, env=home)
    assert (done.returncode, done.stdout) == (0, b"abc\n")
    assert b"cut off at its token limit" in done.stderr


def test_a_terminal_that_writes_to_a_file_writes_answers_alone(home: dict[str, str], tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with running(echo) as stub, (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [*CHAT, "--base-url", stub.url],
            stdin=theirs,
            stdout=out,
            stderr=subprocess.PIPE,
            env={**os.environ, **home},
        )
        os.write(ours, b"one\ntwo\n\x04")
        _, err = process.communicate(timeout=HANG_S)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0 and err.count(b">>> ") == 3
    assert (tmp_path / "out").read_bytes() == b"<1: one>\n<2: two>\n"


# -- on a terminal -------------------------------------------------------------------------------------


def test_a_conversation_and_its_commands(home: dict[str, str], tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    with (
        running(echo, models=("first", "second")) as stub,
        terminal("--base-url", stub.url, environment=home) as t,
    ):
        t.wait_for(f"first at {stub.url}")
        t.ask("one")
        t.wait_for("<1: one>")
        t.wait_for("[4 tokens")
        t.wait_for("to the first]")
        t.ask("/system You are brief")
        t.ask("two \\")
        t.wait_for("... ")
        t.type("more\n")
        t.wait_for("<2: two ")
        t.wait_for("more>")
        t.ask("/set temperature 0.7")
        t.wait_for("temperature: 0.7")
        t.ask("/set stop [1]")
        t.ask("/set stop")
        t.ask("/params")
        t.wait_for("temperature 0.7")
        t.ask("/retry")
        t.wait_for("<3: two ")
        t.ask("/undo")
        t.wait_for("taken back: two ")
        t.ask("/model")
        t.wait_for("* first")
        t.wait_for("  second")
        t.ask("/model second")
        t.ask("//slash")
        t.wait_for("<4: /slash>")
        t.ask(f"/save {saved}")
        t.wait_for("saved to")
        t.ask("/clear")
        t.ask("fresh")
        t.wait_for("<5: fresh>")
        t.ask(f"/load {saved}")
        t.wait_for("4 messages loaded")
        t.ask("last")
        t.wait_for("<6: last>")
        t.ask("/sytem")
        t.wait_for("unknown command /sytem: did you mean /system?")
        t.ask("/set model x")
        t.wait_for("not for /set")
        t.ask("/help")
        t.wait_for("/multiline")
        t.ask("/quit")
        assert t.end() == 0
    first, second, third, fourth, fifth, sixth = stub.bodies
    assert roles(first) == ["user"] and "temperature" not in first
    assert roles(second) == ["system", "user", "assistant", "user"]
    assert second["messages"][-1]["content"] == "two \nmore"
    assert second["messages"][2] == {"role": "assistant", "content": "<1: one>"}
    assert third["messages"] == second["messages"] and third["temperature"] == 0.7 and "stop" not in third
    assert roles(fourth) == roles(second) and fourth["model"] == "second"
    assert roles(fifth) == ["system", "user"]
    assert roles(sixth) == ["system", "user", "assistant", "user", "assistant", "user"]
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    history = Path(home["HEADRACE_STATE"]) / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "fresh\n" in history.read_text()


def test_history_comes_back_and_ctrl_d_ends(home: dict[str, str]) -> None:
    with running(echo) as stub:
        for number in (1, 2):
            with terminal("--base-url", stub.url, environment=home) as t:
                t.wait_for(">>> ")
                t.type("remember me\n" if number == 1 else "\x1b[A\n")
                t.wait_for(f"<{number}: remember me>")
                t.wait_for(">>> ")
                t.type("\x04")
                assert t.end() == 0
    assert (Path(home["HEADRACE_STATE"]) / "chat_history").read_text() == "remember me\n"  # not twice in a row


def endless(body: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    if number > 1:
        yield from said(f"now {len(body['messages'])}")
        return
    while True:
        yield {"content": "tick "}
        time.sleep(0.01)


def test_ctrl_c_stops_the_answer_and_not_the_program(home: dict[str, str]) -> None:
    with running(endless) as stub, terminal("--base-url", stub.url, environment=home) as t:
        t.ask("go")
        t.wait_for("tick tick tick")
        t.type("\x03")
        t.wait_for("(stopped)")
        assert stub.gone.wait(HANG_S)  # the server was told
        t.wait_for(">>> ")
        t.type("half a li\x03")
        t.ask("again")
        t.wait_for("now 3")
        t.wait_for(">>> ")
        t.type("\x04")
        assert t.end() == 0
    assert [message["content"] for message in stub.bodies[1]["messages"]][::2] == ["go", "again"]
    assert stub.bodies[1]["messages"][1]["content"].startswith("tick tick")


def test_lines_in_blocks_and_in_multiline_mode(home: dict[str, str]) -> None:
    with running(echo) as stub, terminal("--base-url", stub.url, environment=home) as t:
        t.ask('"""first')
        t.type('  second\n\nthird"""\n')
        t.wait_for("<1: first")
        t.ask("/multiline")
        t.ask("a")
        t.type("b\n\n")
        t.wait_for("<2: a")
        t.ask("/multiline")
        t.ask('/system """one')
        t.type('two"""\n')
        t.ask("c")
        t.wait_for("<3: c>")
        t.ask("/quit")
        assert t.end() == 0
    assert stub.bodies[0]["messages"][0]["content"] == "first\n  second\n\nthird"
    assert stub.bodies[1]["messages"][2]["content"] == "a\nb"
    assert stub.bodies[2]["messages"][0] == {"role": "system", "content": "one\ntwo"}


def thinking(body: dict[str, Any], number: int) -> list[dict[str, Any]]:
    return [{"reasoning_content": "let me "}, {"reasoning": "see"}, *said("Forty\x1b]0;x\x07two")]


@pytest.mark.parametrize("no_color", ["", "1"])
def test_thinking_is_dimmed_and_control_characters_are_dropped(no_color: str, home: dict[str, str]) -> None:
    env = {**home, "NO_COLOR": no_color}
    with running(thinking) as stub, terminal("--base-url", stub.url, environment=env) as t:
        t.ask("hi")
        t.wait_for("Forty]0;xtwo")
        t.ask("/quit")
        assert t.end() == 0
    colors = [mark for mark in ("\x1b[2m", "\x1b[1m", "\x1b[0m") if mark in t.screen]
    if no_color:
        assert colors == [] and "[thinking] let me see\r\n[answer] Forty" in t.screen
    else:
        assert len(colors) == 3 and "\x1b[2mlet me see\x1b[0m\r\n\r\nForty" in t.screen


def test_thinking_is_folded_by_a_flag(home: dict[str, str]) -> None:
    with running(thinking) as stub, terminal("--base-url", stub.url, "--no-reasoning", environment=home) as t:
        t.ask("hi")
        t.wait_for("(thinking …)")
        t.wait_for("Forty")
        t.ask("/quit")
        assert t.end() == 0
    assert "let me" not in t.screen


def test_calls_are_shown_and_the_person_answers_them(home: dict[str, str]) -> None:
    def answer(body: dict[str, Any], number: int) -> list[dict[str, Any]]:
        if body["messages"][-1]["role"] == "tool":
            return said("It is 3.")
        begin = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": ""}}
        pieces = [{"index": 0, "function": {"arguments": part}} for part in ('{"a":', " 1}")]
        return [{"tool_calls": [piece]} for piece in (begin, *pieces)] + [{"finish_reason": "tool_calls"}]

    with running(answer) as stub, terminal("--base-url", stub.url, environment=home) as t:
        t.ask("add")
        t.wait_for('calls add({"a": 1})')
        t.wait_for("result of add: ")
        t.type("3\n")
        t.wait_for("It is 3.")
        t.ask("add")
        t.wait_for("result of add: ")
        t.type("\n")
        t.ask("/quit")
        assert t.end() == 0
    called, result = stub.bodies[1]["messages"][1:]
    assert called["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "3"}


def test_a_failed_answer_leaves_no_trace_and_can_be_asked_again(home: dict[str, str]) -> None:
    def answer(body: dict[str, Any], number: int) -> Any:
        return (503, {"error": {"message": "loading"}}) if number == 1 else echo(body, number)

    with running(answer) as stub, terminal("--base-url", stub.url, environment=home) as t:
        t.ask("hi")
        t.wait_for("503: loading")
        t.ask("/undo")
        t.wait_for("nothing to take back")
        t.ask("/retry")
        t.wait_for("<2: hi>")
        t.ask("/quit")
        assert t.end() == 0
    assert stub.bodies[1]["messages"] == [{"role": "user", "content": "hi"}]


# -- parts ---------------------------------------------------------------------------------------------


def test_a_file_that_is_no_chat_is_neither_loaded_nor_overwritten(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    conversation = Conversation("m")
    for act in (conversation.load, conversation.save):
        with pytest.raises(ChatFault, match="not a saved chat"):
            act(other)
    assert other.read_text() == "mine"
    conversation.ask("hi")
    conversation.save(tmp_path / "chat.json")
    conversation.save(tmp_path / "chat.json")
    assert json.loads((tmp_path / "chat.json").read_text())["messages"] == [{"role": "user", "content": "hi"}]


def test_whole_calls_without_an_index() -> None:
    answer = Answer()
    for name in ("a", "b"):
        answer.add(Delta(calls=({"id": name, "function": {"name": name, "arguments": "{}"}},)))
    assert [call["function"]["name"] for call in answer.message()["tool_calls"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h/v1/", "http://h/v1"),
        ("https://h/api/openai", "https://h/api/openai"),
    ],
)
def test_urls(url: str, base: str) -> None:
    assert Endpoint(url).base == base


# -- a real server -------------------------------------------------------------------------------------


def _begin(server: Any, home: dict[str, str], *words: str) -> Any:
    return terminal("--base-url", server.url, "--temperature", "0", *words, environment=home)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_a_real_server(serve: Serve, home: dict[str, str]) -> None:
    server = serve("plain")
    done = piped(b"<|s05|>", "--base-url", server.url, "--temperature", "0", env=home)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ABCDEFGH\n", b"")
    t: Terminal
    with _begin(server, home) as t:
        t.ask("<|s00|>")
        t.wait_for("Alpha beta gamma delta.")
        t.wait_for("[9 tokens")
        t.ask("/clear")
        t.ask("<|s01|>")
        t.wait_for("one two three four five six one")
        t.type("\x03")
        t.wait_for("(stopped)")
        wait_until(lambda: server.metrics().running == 0, 20, "the server to stop")
        t.ask("/clear")
        t.ask("/set max_tokens 2")
        t.ask("<|s05|>")
        t.wait_for("AB")
        t.wait_for("cut off at the token limit")
        t.ask("/set top_k -5")
        t.ask("<|s05|>")
        t.wait_for("400: ")
        t.wait_for(">>> ")
        t.type("\x04")
        assert t.end() == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thinking_of_a_real_server(serve: Serve, home: dict[str, str]) -> None:
    with _begin(serve("think_open"), home) as t:
        t.ask("<|s11|>")
        t.wait_for("\x1b[2mplan it\x1b[0m")
        t.wait_for("42")
        t.ask("/quit")
        assert t.end() == 0
