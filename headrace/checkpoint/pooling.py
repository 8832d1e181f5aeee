"""How a checkpoint says that token states become one vector: sentence-transformers' files, GGUF metadata.

Headrace takes the state of the last token (what decoder models for embeddings are trained for). A checkpoint that
says something else, or that attends in both directions, would give vectors that look right and are not: it is
refused. One that says nothing is taken as a decoder model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.checkpoint.config import read_json_object, text_fields
from headrace.checkpoint.gguf_file import read_metadata

# Its checkpoints pool the last token; copies of them often lack the folder that says so.
_LAST_TOKEN_TYPES: Final = ("qwen3",)
# GGUF's pooling_type: none, and last token.
_GGUF_LAST: Final = (0, 3)


class PoolingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself as an embedding model.

    Attributes:
        obstacle: why its vectors cannot be made here, one line; "" when they can.
        is_declared: its files say that it is an embedding model.
        query_prompt, document_prompt: put in front of queries and documents in rerank.
    """

    obstacle: str = ""
    is_declared: bool = False
    query_prompt: str = ""
    document_prompt: str = ""


def read_pooling(path: Path) -> PoolingFacts:
    """Facts of the model at ``path``, a folder or a ``.gguf`` file. Raises ModelFileError for broken files."""
    return _folder_facts(path) if path.is_dir() else _gguf_facts(path)


def _folder_facts(folder: Path) -> PoolingFacts:
    config = text_fields(read_json_object(folder / "config.json"))
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return PoolingFacts(obstacle="it attends in both directions, which is not built; use a decoder model")
    modules = folder / "modules.json"
    if not modules.exists():
        return PoolingFacts()
    prompts = _prompts(folder / "config_sentence_transformers.json")
    obstacle = ""
    for module in _read_list(modules):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            obstacle = obstacle or _pooling_obstacle(folder / str(module.get("path", "")), config)
        elif kind not in ("Transformer", "Normalize"):
            obstacle = obstacle or f"its vectors pass a {kind} layer, which is not built"
    return PoolingFacts(
        obstacle=obstacle,
        is_declared=True,
        query_prompt=prompts.get("query", ""),
        document_prompt=prompts.get("document", ""),
    )


def _pooling_obstacle(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / "config.json"
    if not file.exists():
        if config.get("model_type") in _LAST_TOKEN_TYPES:
            return ""
        return f"modules.json names {folder.name}/config.json, which is missing; add it to the folder"
    pooling = read_json_object(file)
    modes = [name.removeprefix("pooling_mode_") for name, on in pooling.items() if on is True and "_mode_" in name]
    if isinstance(pooling.get("pooling_mode"), str):
        modes = [pooling["pooling_mode"]]
    if modes == ["lasttoken"]:
        return ""
    return f"it pools by {' and '.join(modes) or 'no mode'}; only the last token's state is built"


def _prompts(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    prompts = read_json_object(path).get("prompts")
    found = prompts.items() if isinstance(prompts, dict) else ()
    return {name: text for name, text in found if isinstance(text, str)}


def _read_list(path: Path) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.MsgspecError):
        return [{"type": "module that cannot be read"}]


def _gguf_facts(path: Path) -> PoolingFacts:
    metadata = read_metadata(path)
    pooling = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if isinstance(pooling, int) and pooling not in _GGUF_LAST:
        return PoolingFacts(obstacle=f"it pools by type {pooling}; only the last token's state (3) is built")
    return PoolingFacts(is_declared=pooling == _GGUF_LAST[1])
