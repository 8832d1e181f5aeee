"""What checkpoints say about pooling, and which of them are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.pooling import read_pooling

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def folder(path: Path, pooling: dict[str, Any] | None, *modules: dict[str, Any], **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if modules:
        (path / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


@pytest.mark.parametrize(
    ("pooling", "words"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, ""),
        ({"pooling_mode": "lasttoken"}, ""),
        ({"pooling_mode_mean_tokens": True}, "mean_tokens"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}, "cls_token"),
        ({"pooling_mode": "mean"}, "mean"),
        ({}, "no mode"),
        (None, "missing"),
    ],
)
def test_only_the_last_token(tmp_path: Path, pooling: dict[str, Any] | None, words: str) -> None:
    facts = read_pooling(folder(tmp_path, pooling, TRANSFORMER, POOLING, NORMALIZE))
    assert facts.is_declared
    assert words in facts.obstacle if words else facts.obstacle == ""


def test_other_obstacles(tmp_path: Path) -> None:
    last = {"pooling_mode_lasttoken": True}
    path = folder(tmp_path, last, TRANSFORMER, POOLING, DENSE)
    assert "Dense" in read_pooling(path).obstacle
    (path / "modules.json").write_text("{")
    assert "cannot be read" in read_pooling(path).obstacle
    (path / "config.json").write_text(json.dumps({"use_bidirectional_attention": True}))
    assert "both directions" in read_pooling(path).obstacle


def test_nothing_said_and_prompts(tmp_path: Path) -> None:
    facts = read_pooling(folder(tmp_path, None))
    assert not facts.is_declared and facts.obstacle == ""
    (tmp_path / "modules.json").write_text(json.dumps([TRANSFORMER, POOLING]))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "Instruct: x\nQuery:", "document": ""}})
    )
    facts = read_pooling(tmp_path)
    assert facts.is_declared and facts.obstacle == ""
    assert (facts.query_prompt, facts.document_prompt) == ("Instruct: x\nQuery:", "")
