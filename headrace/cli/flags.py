"""Flags as data, and the one reader of them.

A command's flags are a table of ``Flag`` rows. Command line and configuration file are two ways to *give* flags;
both produce the same thing, a list of ``Given`` (which flag, which value). ``collect`` then merges such lists
into values by target and finds contradictions: two different flags that set one target to different values.

    argv ──read_arguments──┐
                           ├─ Given … ──collect──► {"engine.max_num_seqs": 8, …}
    file ──read_mapping────┘
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from headrace.cli.values import Kind
from headrace.errors import StartupError


class UsageError(StartupError):
    """The command line or the configuration file is wrong; one line, exit code 2."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        name: with its dashes.
        help: one line for ``--help``; an empty one hides the flag there.
        target: "section.field" that the value sets; "" for a flag that asks for what is always so.
        kind: the value's shape; None: a switch, which stores ``const``.
        default: shown in ``--help``.
        repeat: may be given several times; the value is then a tuple.
        const: value of a switch.
        alias_of: name of the flag this one is another spelling of; ``target`` and ``kind`` come from there.
        refused: not empty: the flag is known and refused, with this advice.
    """

    name: str
    help: str = ""
    target: str = ""
    kind: Kind | None = None
    default: str = ""
    repeat: bool = False
    const: object = True
    alias_of: str = ""
    refused: str = ""

    @property
    def key(self) -> str:
        """Spelling in configuration files."""
        return self.name.lstrip("-").replace("-", "_")


@dataclass(frozen=True, slots=True)
class Given:
    """A flag with the value somebody gave it."""

    flag: Flag
    value: object


@dataclass(frozen=True, slots=True)
class FlagTable:
    """Flags of one command, in titled groups. Aliases are resolved when the table is made."""

    groups: tuple[tuple[str, tuple[Flag, ...]], ...]

    @classmethod
    def of(cls, groups: Mapping[str, Sequence[Flag]]) -> FlagTable:
        originals = {flag.name: flag for flags in groups.values() for flag in flags}

        def resolve(flag: Flag) -> Flag:
            if not flag.alias_of:
                return flag
            original = originals[flag.alias_of]
            note = flag.help or f"same as {flag.alias_of}"
            return replace(flag, help=note, target=original.target, kind=original.kind, repeat=original.repeat)

        return cls(tuple((title, tuple(resolve(flag) for flag in flags)) for title, flags in groups.items()))

    @property
    def flags(self) -> tuple[Flag, ...]:
        return tuple(flag for _, flags in self.groups for flag in flags)


class OneLineParser(argparse.ArgumentParser):
    """argparse whose complaints are UsageErrors; an unknown flag comes with the nearest known one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        name, _, said = message.removeprefix("argument ").partition(": ")
        if name == "unrecognized arguments":
            word = said.split()[0].split("=")[0]
            raise UsageError(
                unknown(word, self._option_names(), "flag") if word[0] == "-" else f"unexpected {word}"
            )
        if said.startswith("ignored explicit argument"):
            raise UsageError(f"{name} takes no value")
        raise UsageError(message.removeprefix("argument "))

    def _option_names(self) -> list[str]:
        names = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                names += [name for inner in action.choices.values() for name in inner._option_string_actions]
        return names


class _Record(argparse.Action):
    """Appends a ``Given`` to the namespace; refuses what is to be refused at once."""

    def __init__(self, flag: Flag, option_strings: Sequence[str], dest: str) -> None:
        self.flag = flag
        super().__init__(
            option_strings,
            dest,
            nargs="?" if flag.refused else (0 if flag.kind is None else None),
            metavar=flag.kind.metavar if flag.kind else None,
            help=_help_line(flag),
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        flag = self.flag
        value = flag.const if flag.kind is None and not flag.refused else parse_value(flag, str(values))
        namespace.given.append(Given(flag, value))


def _help_line(flag: Flag) -> str:
    if flag.refused or not flag.help:
        return argparse.SUPPRESS
    default = f" (default: {flag.default})" if flag.default else ""
    repeat = "; repeatable" if flag.repeat else ""
    return (flag.help + repeat + default).replace("%", "%%")


def parse_value(flag: Flag, value: str) -> object:
    """``value`` as the flag's kind reads it. Raises UsageError: refused flag, or a value it cannot have."""
    if flag.refused:
        raise UsageError(f"{flag.name} is not available: {flag.refused}")
    assert flag.kind is not None
    try:
        return flag.kind.parse(value)
    except ValueError as error:
        raise UsageError(f"{flag.name} must be {error}; got {value!r}") from None


def make_parser(command: str, usage: str, description: str, table: FlagTable) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=f"headrace {command}",
        usage=f"headrace {command} {usage}",
        description=description,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    for title, flags in table.groups:
        group = parser.add_argument_group(title)
        for flag in flags:
            group.add_argument(flag.name, action=_Record, flag=flag)
    return parser


def read_arguments(
    parser: argparse.ArgumentParser, table: FlagTable, argv: Sequence[str]
) -> tuple[list[str], list[Given]]:
    """Positional arguments and flags of ``argv``. ``--help`` prints and exits with 0.

    Raises UsageError: unknown flag (with the nearest name), missing or wrong value.
    """
    namespace = argparse.Namespace(given=[])
    _, rest = parser.parse_known_args(list(argv), namespace)
    for word in rest:
        if word.startswith("-") and word != "-":
            known = ["--help", *(flag.name for flag in table.flags)]
            raise UsageError(unknown(word.split("=")[0], known, "flag"))
    return rest, namespace.given


def read_mapping(table: FlagTable, mapping: Mapping[str, object], source: str) -> list[Given]:
    """Flags of a configuration mapping: names without dashes in front, ``-`` or ``_`` between words.

    Switches are true or false, repeatable flags a list or one value.
    """
    by_key = {flag.key: flag for flag in table.flags}
    given: list[Given] = []
    spelled: dict[str, str] = {}
    for name, value in mapping.items():
        flag = by_key.get(str(name).replace("-", "_"))
        if flag is None:
            raise UsageError(f"{source}: {unknown(str(name), list(by_key), 'setting')}")
        if (before := spelled.setdefault(flag.key, str(name))) != str(name):
            raise UsageError(f"{source}: {before} and {name} are the same setting: give one of them")
        try:
            given += _from_mapping(flag, value)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None
    return given


def _from_mapping(flag: Flag, value: object) -> list[Given]:
    if flag.refused:
        parse_value(flag, "")
    if value is None:
        raise UsageError(f"{flag.key} has no value")
    if flag.kind is None:
        return _switch_from_mapping(flag, value)
    if isinstance(value, list) and flag.repeat:
        return [given for item in value for given in _from_mapping(flag, item)]
    if isinstance(value, dict):
        value = json.dumps(value)
    if isinstance(value, bool | list):
        raise UsageError(f"{flag.key} takes a value, not {json.dumps(value)}")
    return [Given(flag, parse_value(flag, str(value)))]


def _switch_from_mapping(flag: Flag, value: object) -> list[Given]:
    if not isinstance(value, bool):
        raise UsageError(f"{flag.key} must be true or false; got {value!r}")
    if value:
        return [Given(flag, flag.const)]
    if isinstance(flag.const, bool) and flag.target:
        return [Given(flag, not flag.const)]
    if not flag.target:
        raise UsageError(f"{flag.key} cannot be turned off: {flag.help}")
    return []


def collect(given: Iterable[Given]) -> dict[str, object]:
    """Values by target. One flag given twice: the last counts (repeatable ones: all).

    Raises UsageError: two different flags set one target to different values.
    """
    values: dict[str, object] = {}
    setters: dict[str, Flag] = {}
    for item in given:
        flag = item.flag
        if not flag.target:
            continue
        if flag.repeat:
            values[flag.target] = (*_as_tuple(values.get(flag.target)), item.value)
            continue
        before = setters.get(flag.target)
        if before is not None and before.name != flag.name and values[flag.target] != item.value:
            raise UsageError(f"{before.name} and {flag.name} contradict each other: give one of them")
        values[flag.target] = item.value
        setters[flag.target] = flag
    return values


def _as_tuple(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else ()


def unknown(name: str, known: Iterable[str], what: str) -> str:
    """One line about an unknown name, with the nearest known one (dashes in front make nothing alike)."""
    words = {word.lstrip("-"): word for word in known}
    near = difflib.get_close_matches(name.lstrip("-"), words, n=1, cutoff=0.6)
    return f"unknown {what} {name}" + (f": did you mean {words[near[0]]}?" if near else "")


def is_unicode(text: str) -> bool:
    """False for words and paths with bytes that the system's encoding does not have."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
