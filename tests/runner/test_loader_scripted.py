"""Whole scripted checkpoints through the loader: every layout says its scripts to the letter, or is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import scripted

from headrace.checkpoint.model_folder import describe
from headrace.errors import ModelFileError
from headrace.runner.loading.loader import load_model
from headrace.runner.mlx_lm_adapter import one_sequence_cache

WORDS = scripted.vocabulary()
BY_ID = {number: piece for piece, number in WORDS.ids.items()}


def _says(folder: Path, script: str, count: int) -> list[bytes]:
    """The first ``count`` tokens, greedily, that answer a turn of one trigger."""
    model = load_model(describe(folder), device="cpu").model
    prompt = [WORDS.added[name] for name in (f"<|{script}|>", "<|assistant|>")]
    cache, step, said = one_sequence_cache(model), mx.array([prompt]), []
    for _ in range(count):
        chosen = int(mx.argmax(model(step, cache=cache)[0, -1]))
        said.append(BY_ID.get(chosen, b""))
        step = mx.array([[chosen]])
    return said


def _copy(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config = {name: value for name, value in {**config, **changes}.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    return target


def _save_ones(folder: Path, name: str) -> None:
    """All tensors of the folder, set to 1, in one more file."""
    tensors = describe(folder).tensors.values()
    mx.save_safetensors(str(folder / name), {tensor.name: mx.ones(tensor.shape) for tensor in tensors})


@pytest.mark.parametrize("variant", ["plain", "tied", "sharded", "fp16"])
def test_every_layout_says_its_script(scripted_folder: Callable[[str], Path], variant: str) -> None:
    assert _says(scripted_folder(variant), "s05", 4) == scripted.expected_pieces("s05", 4)


def test_tied_without_the_flag(scripted_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(scripted_folder("tied"), tmp_path / "m", tie_word_embeddings=None)
    assert _says(folder, "s00", 3) == scripted.expected_pieces("s00", 3)


def test_untied_without_an_output_matrix_is_refused(
    scripted_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = _copy(scripted_folder("tied"), tmp_path / "m", tie_word_embeddings=False)
    with pytest.raises(ModelFileError, match=r"lm_head\.weight is missing"):
        load_model(describe(folder), device="cpu")


def test_files_beside_the_model_change_nothing(scripted_folder: Callable[[str], Path], tmp_path: Path) -> None:
    for variant, names in (("sharded", ["consolidated.safetensors"]), ("plain", ["adapters.safetensors"])):
        folder = _copy(scripted_folder(variant), tmp_path / variant)
        for name in names:
            _save_ones(folder, name)
        (folder / "._model.safetensors").write_bytes(b"\0\5\26\7")
        assert _says(folder, "s05", 3) == scripted.expected_pieces("s05", 3)


def test_the_only_file_may_have_any_name(scripted_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(scripted_folder("plain"), tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.00.safetensors")
    assert _says(folder, "s05", 3) == scripted.expected_pieces("s05", 3)


def _second(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


@pytest.mark.parametrize("damage", ["gone", "empty", "one byte short"])
def test_a_damaged_shard_is_incomplete(
    scripted_folder: Callable[[str], Path], tmp_path: Path, damage: str
) -> None:
    folder = _copy(scripted_folder("sharded"), tmp_path / "m")
    shard = _second(folder)
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(b"" if damage == "empty" else shard.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=f"{shard.name}: incomplete"):
        describe(folder)


def test_shards_without_their_index(scripted_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(scripted_folder("sharded"), tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    assert _says(folder, "s05", 3) == scripted.expected_pieces("s05", 3)
    _second(folder).unlink()
    with pytest.raises(ModelFileError, match="incomplete: 2 of 3 shards"):
        describe(folder)


@pytest.mark.parametrize(("field", "step"), [("vocab_size", 1), ("vocab_size", -1), ("num_hidden_layers", 1)])
def test_counts_that_are_off_by_one(
    scripted_folder: Callable[[str], Path], tmp_path: Path, field: str, step: int
) -> None:
    count = json.loads((scripted_folder("plain") / "config.json").read_text())[field]
    folder = _copy(scripted_folder("plain"), tmp_path / "m", **{field: count + step})
    with pytest.raises(ModelFileError, match=field):
        load_model(describe(folder), device="cpu")
