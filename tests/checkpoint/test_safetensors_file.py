"""Headers of safetensors files: what is wrong is named, nothing is believed, the right files are chosen."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import raw_safetensors, tiny_weights, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from headrace.checkpoint.safetensors_file import choose_files, read_folder_tensors, read_tensor_table
from headrace.errors import ModelFileError

WHOLE = save({"a": np.zeros((2, 3), np.float32), "b": np.zeros((4,), np.float16)})


def _file(folder: Path, content: bytes) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


def _header(**entries: Any) -> bytes:
    return json.dumps(entries).encode()


def test_the_table_of_a_sound_file(tmp_path: Path) -> None:
    table = read_tensor_table(_file(tmp_path, WHOLE))
    assert {name: (info.dtype, info.shape, info.nbytes) for name, info in table.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("F16", (4,), 8),
    }


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "empty file": (b"", "incomplete"),
    "length past the end": (raw_safetensors(b"{}", length=100), "incomplete"),
    "length of 2^60": (raw_safetensors(b"{}", length=1 << 60), "header length 1152921504606846976"),
    "length of 2^64-1": (b"\xff" * 8 + b"{}", "header length"),
    "no JSON": (raw_safetensors(b"{nope"), "not JSON"),
    "deep JSON": (raw_safetensors(b"[" * 100_000), "not JSON"),
    "a list": (raw_safetensors(b"[]"), "not a JSON object"),
    "entry no object": (raw_safetensors(_header(a=3)), "tensor a"),
    "unknown dtype": (raw_safetensors(_header(a=F32 | {"dtype": "F31"}), bytes(8)), "dtype 'F31'"),
    "negative shape": (raw_safetensors(_header(a=F32 | {"shape": [-2]}), bytes(8)), "shape"),
    "shape no list": (raw_safetensors(_header(a=F32 | {"shape": 2}), bytes(8)), "shape"),
    "boolean length": (raw_safetensors(_header(a=F32 | {"shape": [True]}), bytes(8)), "shape"),
    "offsets no pair": (raw_safetensors(_header(a=F32 | {"data_offsets": [0]}), bytes(8)), "data_offsets"),
    "offsets too small": (raw_safetensors(_header(a=F32 | {"data_offsets": [0, 4]}), bytes(4)), "needs 8 bytes"),
    "huge shape": (raw_safetensors(_header(a=F32 | {"shape": [1 << 62, 1 << 62]}), bytes(8)), "needs"),
    "overlap": (
        raw_safetensors(_header(a=F32, b=F32 | {"data_offsets": [4, 12]}), bytes(12)),
        "tensor b: its data_offsets overlap",
    ),
    "hole": (raw_safetensors(_header(a=F32 | {"data_offsets": [8, 16]}), bytes(16)), "belong to no tensor"),
    "trailing bytes": (raw_safetensors(_header(a=F32), bytes(20)), "12 bytes after the last tensor"),
    "one byte short": (WHOLE[:-1], "incomplete: tensor"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header_is_named(tmp_path: Path, case: str) -> None:
    content, message = BROKEN[case]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelFileError, match=message) as caught:
        read_tensor_table(_file(tmp_path, content))
    assert str(caught.value).startswith("model.safetensors: ")
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_damage_is_an_error_or_a_sound_table(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    path = _file(tmp_path_factory.getbasetemp(), bytes(content))
    try:
        table = read_tensor_table(path)
    except ModelFileError:
        return
    assert 8 + sum(info.nbytes for info in table.values()) <= len(content)


def test_an_index_decides_alone(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=3)
    save_file({name: np.ones_like(value) for name, value in tiny_weights().items()}, folder / "model.safetensors")
    save_file(
        {name: np.ones_like(value) for name, value in tiny_weights().items()}, folder / "consolidated.safetensors"
    )
    files = choose_files(folder)
    assert files.names == tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
    assert files.ignored == ("consolidated.safetensors", "model.safetensors")
    assert set(read_folder_tensors(folder, files)) == set(tiny_weights())


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=3)
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["extra.weight"] = "model-00002-of-00003.safetensors"
    index_path.write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003.safetensors: incomplete: tensor extra.weight"):
        read_folder_tensors(folder, choose_files(folder))
    index["weight_map"]["extra.weight"] = "model-00004-of-00003.safetensors"
    index_path.write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"model-00004-of-00003.safetensors: incomplete"):
        read_folder_tensors(folder, choose_files(folder))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 5}}'])
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"weight_map|not JSON"):
        choose_files(folder)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "adapters.safetensors", "old.safetensors"], ["model.safetensors"]),
        (["weights.00.safetensors"], ["weights.00.safetensors"]),
        (["weights.00.safetensors", "adapter_model.safetensors"], ["weights.00.safetensors"]),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "x.safetensors"], None),
        (["._model.safetensors", ".hidden.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["model_a.safetensors", "other.safetensors"], ["model_a.safetensors"]),
    ],
)
def test_without_an_index(tmp_path: Path, names: list[str], chosen: list[str] | None) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    assert list(choose_files(tmp_path).names) == (names[:2] if chosen is None else chosen)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "incomplete"),
        (["adapters.safetensors"], "incomplete"),
        (["a.safetensors", "b.safetensors"], "several weight files"),
        (["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"], "number 2 is missing"),
    ],
)
def test_an_unclear_choice_is_refused(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelFileError, match=message):
        choose_files(tmp_path)
