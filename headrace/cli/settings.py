"""From flag values to a validated configuration: the one place that builds EngineConfig and ServerConfig.

Values come as ``{"section.field": value}``; defaults are those of ``headrace.config``. Nothing here reads the
process's environment or the network: the caller passes both in.
"""

from __future__ import annotations

import importlib.util
import ipaddress
from collections.abc import Mapping
from typing import Any, cast

from headrace.cli.flags import UsageError
from headrace.cli.keys import read_keys
from headrace.config import EngineConfig, ServerConfig, SideModel

Values = Mapping[str, object]

# Of models beside the main one: tokens of their longest input without a flag, blocks beyond it for short ones.
_SIDE_LENGTH = 8192
_SIDE_BLOCK_SIZE = 32
_SIDE_SPARE_BLOCKS = 64
_SIDE_SEQUENCES = 64
_SHARED_WITH_SIDES = frozenset({
    "dtype", "keep_quantized", "memory_utilization", "memory_headroom", "enable_prefix_cache", "prefill_step_size",
    "max_queue",
})  # fmt: skip

# targets of which at most one may be given, with the flags people know them by
_EXCLUSIVE = (
    ("engine.kv_memory_bytes", "--kv-memory-mb", "engine.max_cache_blocks", "--max-cache-blocks"),
    ("engine.prefix_cache_bytes", "--cache-memory-mb", "engine.prefix_cache_share", "--cache-memory-percent"),
)


def section(values: Values, name: str) -> dict[str, Any]:
    """Fields of one section: ``{"port": 1}`` for ``server`` of ``{"server.port": 1, "engine.dtype": "auto"}``."""
    prefix = name + "."
    return {target.removeprefix(prefix): value for target, value in values.items() if target.startswith(prefix)}


def check(values: Values) -> None:
    """Raises UsageError for values that contradict each other; needs neither model nor network."""
    for target, flag, other_target, other_flag in _EXCLUSIVE:
        if target in values and other_target in values:
            raise UsageError(f"{flag} and {other_flag} say the same in two ways: give one of them")
    if "kv.quantize" in values and values.get("engine.kv_cache_dtype") == "auto":
        raise UsageError(
            "--kv-cache-quantization and --kv-cache-dtype auto contradict each other: give one of them"
        )
    server = section(values, "server")
    if ("ssl_certfile" in server) != ("ssl_keyfile" in server):
        raise UsageError("--ssl-certfile and --ssl-keyfile belong together: give both or neither")
    highest = server.get("max_request_tokens", _default("max_request_tokens"))
    if server.get("max_tokens", 0) > highest:
        raise UsageError(f"--max-tokens {server['max_tokens']} is above --max-request-tokens {highest}")
    if "otlp_traces_endpoint" in server and not _has_opentelemetry():
        raise UsageError(
            "--otlp-traces-endpoint needs OpenTelemetry, which is not installed: pip install 'headrace[otel]'"
        )
    if values.get("engine.enable_prefix_cache") is False and (
        "engine.prefix_cache_bytes" in values or "engine.prefix_cache_share" in values
    ):
        raise UsageError("--disable-prefix-cache leaves nothing for --cache-memory-mb or --cache-memory-percent")


def _has_opentelemetry() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def _engine_fields(values: Values) -> dict[str, Any]:
    """Fields of EngineConfig but the model; ``--kv-cache-quantization`` alone means 8 bits."""
    fields = section(values, "engine")
    if "kv.quantize" in values:
        fields.setdefault("kv_cache_dtype", "int8")
    return fields


def _default(field: str) -> Any:
    probe = ServerConfig(engine=EngineConfig(model=""), served_model_names=())
    return getattr(probe, field)


def engine_config(values: Values, model_path: str) -> EngineConfig:
    """Configuration of the worker; ``model_path`` is on this machine."""
    return EngineConfig(model=model_path, **_engine_fields(values))


def side_model(values: Values, path: str, name: str) -> SideModel:
    """A model beside the main one; its pool holds the longest input and some short ones beside it.

    It shares what the flags say of weights and memory; the size of the main model's pool is not its own.
    """
    fields = {field: value for field, value in _engine_fields(values).items() if field in _SHARED_WITH_SIDES}
    length = cast("int | None", section(values, "server").get("embedding_max_length")) or _SIDE_LENGTH
    blocks = -(-(length + 1) // _SIDE_BLOCK_SIZE) + _SIDE_SPARE_BLOCKS
    engine = EngineConfig(
        model=path, block_size=_SIDE_BLOCK_SIZE, max_cache_blocks=blocks, max_num_seqs=_SIDE_SEQUENCES, **fields
    )
    return SideModel(name=name, engine=engine)


def server_config(
    values: Values,
    model_path: str,
    model_name: str,
    environment: Mapping[str, str],
    sides: Mapping[str, tuple[str, str]] | None = None,
) -> ServerConfig:
    """Configuration of the gateway. ``model_name`` is the API's name without ``--served-model-name``.

    ``sides``: path and name of the models beside the main one, by field of ServerConfig.

    Raises UsageError as ``check``, for a non-loopback host that nobody needs a key for, and for isolation between
    keys where there are none.
    """
    check(values)
    fields = section(values, "server")
    names = cast("tuple[str, ...]", fields.get("served_model_names", (model_name,)))
    fields["served_model_names"] = tuple(dict.fromkeys(names))
    for role, (path, name) in (sides or {}).items():
        fields[role] = side_model(values, path, name)
    fields["api_keys"] = read_keys(
        cast("tuple[str, ...]", values.get("keys.flags", ())),
        cast("str | None", values.get("keys.file")),
        environment,
    )
    if "max_tokens" not in fields and "max_request_tokens" in fields:
        fields["max_tokens"] = min(_default("max_tokens"), fields["max_request_tokens"])
    config = ServerConfig(engine=engine_config(values, model_path), defaults=section(values, "defaults"), **fields)
    if config.prefix_isolation == "key" and not config.api_keys:
        raise UsageError("--prefix-isolation key needs keys to tell callers apart: give --api-key or leave it out")
    if not (config.api_keys or config.insecure or is_loopback(config.host)):
        raise UsageError(
            f"--host {config.host} is reachable from other machines and no API key is set: "
            "give --api-key, or --insecure to serve everybody"
        )
    return config


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``; a name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
