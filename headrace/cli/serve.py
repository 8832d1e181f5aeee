"""``headrace serve [MODEL]``: flags and file become a configuration, MODEL becomes a path; then it serves."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.cli.flags import (
    FlagTable,
    Given,
    UsageError,
    collect,
    is_unicode,
    make_parser,
    read_arguments,
    read_mapping,
)
from headrace.cli.serve_flags import SERVE_FLAGS
from headrace.errors import StartupError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from headrace.config import ServerConfig
    from headrace.gateway.service import EngineClient, RequestMetrics
    from headrace.gateway.tracing import Tracing

_DESCRIPTION = (
    "MODEL is a folder (safetensors, MLX or Hugging Face layout), a .gguf file or a hub id; "
    "without one, the built-in demo model is served. Keys also come from HEADRACE_API_KEY or VLLM_API_KEY "
    "when no key flag is given."
)


def run(argv: Sequence[str]) -> int:
    """Serves until a signal; returns the exit code."""
    from headrace.gateway.early_signals import StoppedEarly, early_signals

    try:
        with early_signals() as hangups:
            config = read_config(argv)
            from headrace.gateway.server import run_server

            return run_server(config, make_app, reread=partial(read_config, argv), hangups=hangups)
    except StoppedEarly:
        return 0


def read_config(argv: Sequence[str]) -> ServerConfig:
    """The configuration that the command line, and the file it names, stand for. Raises as ``resolve``."""
    model, values = parse(argv)
    return resolve(model, values, os.environ)


def make_app(
    config: ServerConfig,
    engine: EngineClient,
    metrics: RequestMetrics,
    sides: Mapping[str, EngineClient] | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The HTTP application of one model and of those beside it.

    Raises StartupError: a tokenizer or chat template is at fault, or a model does not fit its role.
    """
    from headrace.api.app import create_app
    from headrace.text import model_text

    text = model_text.load(config.engine.model, config.chat_template_file)
    return create_app(config, engine, text, metrics, sides, tracing)


def parse(argv: Sequence[str]) -> tuple[str | None, dict[str, object]]:
    """MODEL (None: the demo model) and values by target, of command line and ``--config`` file together.

    Raises UsageError; touches no model and no network.
    """
    positional, given = read_arguments(
        make_parser("serve", "[MODEL] [options]", _DESCRIPTION, SERVE_FLAGS), SERVE_FLAGS, argv
    )
    from headrace.cli.settings import check

    values = collect(given)
    if "cli.config" in values:
        from headrace.cli.config_file import load_config_file

        path = str(values["cli.config"])
        values = collect(_file_given(SERVE_FLAGS, load_config_file(path), path)) | values
    if len(positional) > 1:
        raise UsageError(f"one MODEL, not {len(positional)}: unexpected {positional[1]!r}")
    named = values.get("cli.model")
    if positional and named is not None and positional[0] != named:
        raise UsageError(f"two models were given: {positional[0]} and --model {named}")
    check(values)
    return (positional[0] if positional else None if named is None else str(named)), values


def _file_given(table: FlagTable, mapping: Mapping[str, object], path: str) -> list[Given]:
    name = os.path.basename(path)
    if "config" in mapping:
        raise UsageError(f"{name}: a configuration file cannot name another one")
    return read_mapping(table, mapping, name)


def resolve(model: str | None, values: Mapping[str, object], environment: Mapping[str, str]) -> ServerConfig:
    """The complete configuration; fetches the model when it is not on this machine.

    Raises UsageError before anything is fetched, StartupError when the model cannot be had.
    """
    from headrace.cli.settings import section, server_config

    # everything but the path is checked first: a wrong flag must not cost a download
    server_config(values, model_path="", model_name="model", environment=environment)
    path, name = locate(model, section(values, "download"))
    side_download = {key: value for key, value in section(values, "download").items() if key != "revision"}
    sides = {role: locate(str(named), side_download) for role, named in section(values, "side").items()}
    return server_config(values, model_path=path, model_name=name, environment=environment, sides=sides)


def locate(model: str | None, download: Mapping[str, Any]) -> tuple[str, str]:
    """Path of MODEL on this machine, and its name in the API (never a path of this machine).

    ``download``: fields of ``FetchOptions``. Raises StartupError: no such model, or it cannot be fetched.
    """
    if model is None:
        from headrace.cli.demo_model import DEMO_MODEL_NAME, demo_model_path, ensure_demo_model

        if "revision" in download:
            raise UsageError("--revision is for models from a hub; the demo model has one revision")
        if download.get("offline") and demo_model_path() is None:
            raise StartupError("the demo model is not on this machine, and fetching is off (--offline)")
        return str(ensure_demo_model(partial(_show_progress, DEMO_MODEL_NAME))), DEMO_MODEL_NAME
    from headrace.checkpoint.hub import FetchOptions, ensure_local

    is_local = os.path.exists(os.path.expanduser(model))
    if is_local and "revision" in download:
        raise UsageError(f"--revision is for models from a hub; {model} is on this machine")
    path = os.path.abspath(ensure_local(model, FetchOptions(**download), _show_progress))
    if not is_unicode(path):
        raise StartupError(f"{path}: this path is no text in the system's encoding; rename its folders")
    return path, os.path.basename(path).removesuffix(".gguf") if is_local else model


def _show_progress(name: str, done_bytes: int, all_bytes: int) -> None:
    """One line on a terminal's stderr, rewritten as the download goes on."""
    if not sys.stderr.isatty():
        return
    end = "\n" if done_bytes >= all_bytes else ""
    print(f"\r{name}: {done_bytes // 10**6} of {all_bytes // 10**6} MB\x1b[K{end}", end="", file=sys.stderr)
