"""``headrace chat``: a conversation with an OpenAI-compatible server in the terminal.

On a terminal: a line is a message, ``/`` begins a command. In a pipe the whole standard input is one message and
standard output gets its answer and nothing else. Exit codes: 0; 1 no answer, or a refusal; 2 wrong usage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from headrace.cli.flags import Flag, FlagTable, UsageError, collect, make_parser, read_arguments
from headrace.cli.values import http_url, integer, number, text

if TYPE_CHECKING:
    from headrace.cli.chat_commands import Room
    from headrace.cli.chat_http import Endpoint
    from headrace.cli.chat_session import Conversation
    from headrace.cli.chat_terminal import Screen

_DESCRIPTION = (
    "A chat with a server: headrace serve on this machine, or any OpenAI-compatible URL. Without a terminal, "
    "standard input is one message and its answer is printed. Without --api-key, a server on this machine gets "
    "the key in HEADRACE_API_KEY, any other the one in OPENAI_API_KEY. /help in the chat lists its commands."
)
_DEFAULT_URL = "http://127.0.0.1:8000"

CHAT_FLAGS = FlagTable.of(
    {
        "server": (
            Flag(
                "--base-url", "the server, as OpenAI's clients want it", "chat.url", http_url("URL"), _DEFAULT_URL
            ),
            Flag("--url", alias_of="--base-url"),
            Flag("--api-key", "its key", "chat.key", text("KEY")),
            Flag("--model", "who answers", "chat.model", text("NAME"), "the first that the server lists"),
            Flag("--timeout", "seconds without a byte", "chat.timeout", number(0, above=True), "300"),
        ),
        "answers (default: the server's)": (
            Flag("--system", "system prompt", "chat.system", text("TEXT")),
            Flag("--temperature", "0: the most likely token", "params.temperature", number(0)),
            Flag("--top-p", "share of the likeliest tokens", "params.top_p", number(0, 1, above=True)),
            Flag("--max-tokens", "of an answer", "params.max_tokens", integer(1)),
            Flag("--seed", "same seed, same answer", "params.seed", integer(0)),
        ),
        "display": (Flag("--no-reasoning", "thinking is folded to one line", "chat.fold"),),
    }
)


def run(argv: Sequence[str]) -> int:
    """Raises ChatFault: no server, or (in a pipe) no answer."""
    positional, given = read_arguments(
        make_parser("chat", "[options]", _DESCRIPTION, CHAT_FLAGS), CHAT_FLAGS, argv
    )
    if positional:
        raise UsageError(
            f"unexpected {positional[0]!r}: chat talks to a running server; start it with headrace serve MODEL"
        )
    values = collect(given)
    endpoint = choose_endpoint(values, os.environ)
    from headrace.cli.chat_session import Conversation
    from headrace.cli.settings import section

    message = None if sys.stdin.isatty() else _piped_message()
    model = str(values["chat.model"]) if "chat.model" in values else _first_model(endpoint)
    conversation = Conversation(model, str(values.get("chat.system", "")), section(values, "params"))
    fold = bool(values.get("chat.fold"))
    if message is not None:
        return answer_one(endpoint, conversation, message)
    return converse(endpoint, conversation, fold=fold)


def choose_endpoint(values: Mapping[str, object], environment: Mapping[str, str]) -> Endpoint:
    """The server that the flags name, with the key meant for it. Raises UsageError: a key no header can carry."""
    from headrace.cli.chat_http import Endpoint

    url = str(values.get("chat.url", _DEFAULT_URL))
    key = values.get("chat.key") or _key_for(url, environment)
    if key and not (str(key).isascii() and str(key).isprintable()):
        raise UsageError("the API key has characters that a header cannot carry")
    return Endpoint(url, str(key) if key else None, float(str(values.get("chat.timeout", 300))))


def _key_for(url: str, environment: Mapping[str, str]) -> str | None:
    """The key that the environment has for this host; none goes to a host that it is not for."""
    from headrace.cli.chat_http import key_variable
    from headrace.cli.keys import read_keys

    variable = key_variable(url)
    given = environment.get(variable, "")
    if variable == "OPENAI_API_KEY":
        return given or None
    known = read_keys((), None, {variable: given})  # may be NAME:KEY, as the server reads it
    return known[0].secret if known else None


def _first_model(endpoint: Endpoint) -> str:
    from headrace.cli.chat_http import ChatFault

    names = endpoint.models()
    if not names:
        raise ChatFault(f"{endpoint.url} lists no model: give --model")
    return names[0]


def _piped_message() -> str:
    message = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if not message:
        raise UsageError("standard input is empty: it is the message when it is no terminal")
    return message


def answer_one(endpoint: Endpoint, conversation: Conversation, message: str) -> int:
    """The piped form. Raises ChatFault."""
    from headrace.cli.chat_session import Answer
    from headrace.cli.chat_terminal import Screen

    conversation.ask(message)
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    screen, answer = Screen(sys.stdout, color=False, plain=True, fold=True), Answer()
    with closing(endpoint.stream(conversation.body())) as deltas:
        screen.stream(deltas, answer)
    if answer.finish_reason == "length":
        print("headrace chat: the answer was cut off at its token limit", file=sys.stderr)
    return 0


def converse(endpoint: Endpoint, conversation: Conversation, *, fold: bool) -> int:
    """The terminal form: until Ctrl-D or /quit."""
    from headrace.cli.chat_commands import COMMANDS, Room
    from headrace.cli.chat_terminal import History, Keyboard, Screen, complete_with, import_readline, wants_color
    from headrace.files import state_folder

    color = wants_color(sys.stdout, os.environ)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    readline = import_readline()
    plain = not sys.stdout.isatty()
    screen = Screen(sys.stdout, color=color, plain=plain, fold=fold)
    room = Room(conversation, endpoint, Keyboard(color, readline))
    history = None
    if readline is not None:
        complete_with(readline, list(COMMANDS))
        history = History(readline, state_folder() / "chat_history")
        history.begin()
    if not plain:
        screen.remark(f"{conversation.model} at {endpoint.url}. /help lists the commands, Ctrl-D ends.")
    try:
        while _turn(room, screen):
            pass
    finally:
        if history is not None:
            history.end()
    return 0


def _turn(room: Room, screen: Screen) -> bool:
    """Read, obey or ask. False: the chat is over."""
    from headrace.cli.chat_commands import obey
    from headrace.cli.chat_http import ChatFault

    try:
        typed = room.keyboard.read()
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return True
    if typed is None:
        sys.stdout.write("\n" if sys.stdout.isatty() else "")
        return False
    message: str | None = typed
    if typed.startswith("//"):
        message = typed[1:]
    elif typed.startswith("/"):
        try:
            outcome = obey(typed, room)
        except ChatFault as fault:
            screen.fault(str(fault))
            return True
        except KeyboardInterrupt:
            return True
        if outcome.say:
            screen.remark(outcome.say)
        if outcome.ends:
            return False
        message = outcome.send
    if message:
        room.conversation.ask(message)
        _answer(room, screen)
    return True


def _answer(room: Room, screen: Screen) -> None:
    """Ask for answers until one calls no tool. An interrupt ends the answer, and what there is of it stays."""
    from headrace.cli.chat_http import ChatFault
    from headrace.cli.chat_session import Answer

    conversation = room.conversation
    while True:
        answer = Answer()
        try:
            with closing(room.endpoint.stream(conversation.body())) as deltas:
                screen.stream(deltas, answer)
        except KeyboardInterrupt:
            screen.remark("(stopped)")
            answer.calls.clear()
            if not answer.text:
                conversation.give_back()
                return
        except ChatFault as fault:
            screen.fault(str(fault))
            conversation.give_back()
            return
        if not answer.calls:
            conversation.messages.append(answer.message())
            return
        if not _results(room, screen, answer.message()):
            return


def _results(room: Room, screen: Screen, message: dict[str, object]) -> bool:
    """The person is the tool: a line per call. False: none was given; the answer's text alone stays."""
    calls = message["tool_calls"]
    assert isinstance(calls, list)
    results: list[dict[str, object]] = []
    screen.remark("(type what the tool gives; an empty line ends the turn)")
    for call in calls:
        try:
            line = room.keyboard.line(f"result of {call['function']['name']}: ")
        except KeyboardInterrupt:
            line = None
        if not line:
            del message["tool_calls"]
            room.conversation.messages.append(message)
            return False
        results.append({"role": "tool", "tool_call_id": call["id"], "content": line})
    room.conversation.messages += [message, *results]
    return True
