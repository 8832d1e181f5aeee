"""``headrace model inspect|acquire``: what a model is and whether it fits here; fetching one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.flags import OneLineParser, UsageError

if TYPE_CHECKING:
    from headrace.checkpoint.hub import FetchOptions
    from headrace.checkpoint.model_folder import ModelFiles

_NOT_YET = ("convert", "register", "qualify", "list")
_REPORT_EVERY_S = 0.5


def run(argv: Sequence[str]) -> int:
    """``model SUBCOMMAND …``; returns the exit code."""
    if argv and argv[0] in _NOT_YET:
        raise UsageError(f"{argv[0]}: not available yet")
    arguments = _parser().parse_args(argv)
    if arguments.subcommand == "inspect":
        return _inspect(arguments)
    return _acquire(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="headrace model", description="Look at models and fetch them.")
    commands = parser.add_subparsers(
        dest="subcommand", required=True, metavar="inspect|acquire", parser_class=OneLineParser
    )
    inspect = commands.add_parser("inspect", help="print what a model is, as JSON; loads no weights")
    inspect.add_argument("model", help="folder, .gguf file or hub id (owner/model)")
    acquire = commands.add_parser("acquire", help="fetch a model from the hub, verified")
    acquire.add_argument("model", help="hub id (owner/model)")
    acquire.add_argument("--target-dir", help="where to put it (default: Headrace's cache folder)")
    for command in (inspect, acquire):
        command.add_argument("--revision", help="branch, tag or commit (default: the default branch)")
        command.add_argument("--download-timeout", type=float, default=30.0, metavar="SECONDS")
        command.add_argument("--download-retries", type=int, default=3, metavar="N")
    return parser


def _options(arguments: argparse.Namespace) -> FetchOptions:
    from headrace.checkpoint.hub import FetchOptions

    return FetchOptions(
        revision=arguments.revision, timeout_s=arguments.download_timeout, retries=arguments.download_retries
    )


# -- acquire -------------------------------------------------------------------------------------------


def _acquire(arguments: argparse.Namespace) -> int:
    from headrace.checkpoint.hub import acquire, cached_target

    options = _options(arguments)
    target = Path(arguments.target_dir) if arguments.target_dir else cached_target(arguments.model, options)
    progress = ProgressLine()
    try:
        path = acquire(arguments.model, target, options, progress)
    finally:
        progress.end()
    print(path)
    return 0


class ProgressLine:
    """Progress of a download on stderr: one line, rewritten, on a terminal; a line now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = 0.0
        self._shown = False

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_REPORT_EVERY_S if self._terminal else 10 * _REPORT_EVERY_S)
        percent = 100 * done / total if total else 100.0
        line = f"{percent:5.1f} %  {done / 1e6:,.0f} of {total / 1e6:,.0f} MB  {name}"
        print(f"\r\033[K{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr)
        sys.stderr.flush()
        self._shown = True

    def end(self) -> None:
        if self._shown and self._terminal:
            print(file=sys.stderr)


# -- inspect -------------------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> int:
    from headrace.checkpoint.inspect import describe_files
    from headrace.checkpoint.model_folder import describe

    with _located(arguments) as (path, record):
        files = describe(path)
        report = describe_files(files)
        if record is not None:
            report |= {"source": record["source"], "revision": record["revision"], "path": None}
            for entry in report["files"]:
                entry["bytes"] = record["sizes"].get(entry["name"], entry["bytes"])
        runtime = _runtime(files)
        report["family"]["layer_groups"] = runtime.pop("layer_groups")
        report |= runtime
    print(json.dumps(report, indent=2, default=str))
    return 0


@contextmanager
def _located(arguments: argparse.Namespace) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """The model's path here, or for a hub id that is not here a folder of its headers and where they are from."""
    from headrace.checkpoint.hub import cached_target, ensure_local, exists, is_hub_id

    model, options = arguments.model, _options(arguments)
    path = Path(model).expanduser()
    here = exists(path) or not is_hub_id(model) or Path(model.split("/")[0]).is_dir()
    if here or cached_target(model, options).exists():
        yield ensure_local(model, options), None
        return
    from headrace.checkpoint.hub_headers import remote_folder

    with remote_folder(model, options) as (folder, record):
        yield folder, record


def _runtime(files: ModelFiles) -> dict[str, Any]:
    """Tier, KV memory and fit on this machine: from the model's own definition, built without weights."""
    from headrace.runner.outline import outline

    return outline(files)
