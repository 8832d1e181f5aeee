"""The ``/`` commands of a chat: what each does to the conversation, and one line that says what it did."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.cli.chat_http import ChatFault, Endpoint
from headrace.cli.chat_session import Conversation
from headrace.cli.chat_terminal import Keyboard
from headrace.cli.flags import unknown


@dataclass(frozen=True, slots=True)
class Outcome:
    """``say``: what to show; ``send``: a text to ask now; ``ends``: the chat is over."""

    say: str = ""
    send: str | None = None
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """What commands act on."""

    conversation: Conversation
    endpoint: Endpoint
    keyboard: Keyboard


def obey(line: str, room: Room) -> Outcome:
    """Raises ChatFault: no such command, or it cannot be done."""
    name, _, rest = line.partition(" ") if "\n" not in line.partition(" ")[0] else line.partition("\n")
    if name not in COMMANDS:
        raise ChatFault(f"{unknown(name, COMMANDS, 'command')} (/help lists them; // begins a message with /)")
    return COMMANDS[name][0](room, rest.strip())


def _help(room: Room, rest: str) -> Outcome:
    shown: dict[str, str] = {}
    for name, (_, takes, text) in COMMANDS.items():
        if text:
            shown[f"{name} {takes}".strip()] = text
    lines = [f"{usage:<20} {text}" for usage, text in shown.items()]
    lines += [
        "",
        'A line that ends with \\ goes on in the next one; """ begins and ends a block of lines.',
        "Ctrl-C stops an answer, or drops a line that is being typed; Ctrl-D ends the chat.",
    ]
    return Outcome("\n".join(lines))


def _system(room: Room, rest: str) -> Outcome:
    conversation = room.conversation
    if rest:
        conversation.system = "" if rest == "clear" else rest
        return Outcome("system prompt set" if conversation.system else "no system prompt")
    return Outcome(conversation.system or "no system prompt")


def _clear(room: Room, rest: str) -> Outcome:
    room.conversation.clear()
    return Outcome("a new conversation begins")


def _retry(room: Room, rest: str) -> Outcome:
    text = room.conversation.to_repeat()
    if text is None:
        raise ChatFault("there is nothing to ask again")
    return Outcome(send=text)


def _undo(room: Room, rest: str) -> Outcome:
    text = room.conversation.undo()
    if text is None:
        raise ChatFault("there is nothing to take back")
    first = text.splitlines()[0] if text else ""
    return Outcome(f"taken back: {first[:70]}{' …' if first[70:] or first != text else ''}")


def _save(room: Room, rest: str) -> Outcome:
    path = _path(rest)
    room.conversation.save(path)
    return Outcome(f"saved to {path}")


def _load(room: Room, rest: str) -> Outcome:
    room.conversation.load(_path(rest))
    return Outcome(f"{len(room.conversation.messages)} messages loaded")


def _path(rest: str) -> Path:
    if not rest:
        raise ChatFault("which FILE?")
    return Path(rest).expanduser()


def _model(room: Room, rest: str) -> Outcome:
    if not rest:
        present = room.conversation.model
        names = room.endpoint.models()
        return Outcome("\n".join(f"{'*' if name == present else ' '} {name}" for name in names))
    room.conversation.model = rest
    return Outcome(f"answers come from {rest}")


def _params(room: Room, rest: str) -> Outcome:
    lines = [f"{name} {json.dumps(value)}" for name, value in room.conversation.params.items()]
    return Outcome("\n".join(lines) or "the server's defaults")


def _set(room: Room, rest: str) -> Outcome:
    name, _, value = rest.partition(" ")
    if not name:
        return _params(room, "")
    room.conversation.set(name, value.strip())
    shown = json.dumps(room.conversation.params[name]) if value.strip() else "as the server has it"
    return Outcome(f"{name}: {shown}")


def _multiline(room: Room, rest: str) -> Outcome:
    room.keyboard.multiline = not room.keyboard.multiline
    return Outcome(
        "messages end with an empty line" if room.keyboard.multiline else "messages end with their line"
    )


def _quit(room: Room, rest: str) -> Outcome:
    return Outcome(ends=True)


# name -> (what it does, what it takes, a line for /help; none: another spelling)
COMMANDS: dict[str, tuple[Callable[[Room, str], Outcome], str, str]] = {
    "/help": (_help, "", "this list"),
    "/system": (_system, "[TEXT | clear]", "show, set or drop the system prompt"),
    "/clear": (_clear, "", "forget the conversation"),
    "/retry": (_retry, "", "ask the last message again"),
    "/undo": (_undo, "", "take the last message and its answer back"),
    "/save": (_save, "FILE", "write the conversation to a file"),
    "/load": (_load, "FILE", "go on with a saved one"),
    "/model": (_model, "[NAME]", "list the server's models, or take another one"),
    "/params": (_params, "", "what is sent beside the messages"),
    "/set": (_set, "NAME [VALUE]", "set a field of the request (/set temperature 0.7), or take it back"),
    "/multiline": (_multiline, "", "messages of several lines, on or off"),
    "/quit": (_quit, "", "end"),
    "/exit": (_quit, "", ""),
    "/?": (_help, "", ""),
}
