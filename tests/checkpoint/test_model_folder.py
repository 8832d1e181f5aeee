"""What lies at a path: every kind of broken model is one line that names the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_files import CONFIG, tiny_weights, write_checkpoint

from headrace.checkpoint import families
from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.model_folder import describe
from headrace.errors import ModelFileError


def test_a_sound_folder(tmp_path: Path) -> None:
    files = describe(write_checkpoint(tmp_path / "m", shards=2))
    assert files.kind == "folder"
    assert files.model_file == "llama"
    assert files.weights_bytes == sum(value.nbytes for value in tiny_weights().values())
    assert files.dtypes == ("F32",)
    assert list(files.weight_files) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert files.quantization is None
    assert files.warnings == ()


def test_ignored_weight_files_are_said(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "adapters.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "._model.safetensors").write_bytes(b"litter")
    assert describe(folder).warnings == ("adapters.safetensors is not part of the model and is ignored",)


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def _config(**changes: object) -> Callable[[Path], None]:
    return _write("config.json", json.dumps({**CONFIG, **changes}))


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


FAULTS = {
    "no config": (_remove("config.json"), "config.json: missing"),
    "config {}": (_write("config.json", "{}"), "config.json: model_type is missing"),
    "config no JSON": (_write("config.json", "{"), "config.json: not JSON"),
    "config a list": (_write("config.json", "[]"), "config.json: not a JSON object"),
    "unknown model_type": (_config(model_type="nope"), "config.json: model_type 'nope' is not supported"),
    "a module that is no model": (_config(model_type="rope_utils"), "model_type 'rope_utils' is not supported"),
    "a path as model_type": (_config(model_type="../x"), "is not supported"),
    "own code": (_config(model_file="model.py"), "config.json: model_file"),
    "vocab_size text": (_config(vocab_size="x"), "config.json: vocab_size"),
    "layers 0": (_config(num_hidden_layers=0), "config.json: num_hidden_layers is 0"),
    "unknown quantization": (
        _config(quantization_config={"quant_method": "magic"}),
        "config.json: quantization_config: quant_method 'magic'",
    ),
    "no weights": (_remove("model.safetensors"), "model.safetensors: incomplete"),
    "weights cut": (_cut, "model.safetensors: incomplete"),
    "weights empty": (_write("model.safetensors", ""), "model.safetensors: incomplete"),
    "no tokenizer": (_remove("tokenizer.json"), "tokenizer.json: missing"),
    "tokenizer empty": (_write("tokenizer.json", ""), "tokenizer.json: incomplete"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_one_line_that_names_the_file(tmp_path: Path, case: str) -> None:
    break_it, message = FAULTS[case]
    folder = write_checkpoint(tmp_path / "m")
    break_it(folder)
    with pytest.raises(ModelFileError) as caught:
        describe(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("hello")
    for name, message in (
        ("absent", "no such file or folder"),
        ("empty", "empty: the folder is empty"),
        ("file.txt", "file.txt: a model is a folder or a .gguf file"),
    ):
        with pytest.raises(ModelFileError, match=message):
            describe(tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody who may not read")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("pipe", "pipe.gguf"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ModelFileError, match=f"{name}: a model is a folder or a .gguf file"):
            describe(tmp_path / name)
        with pytest.raises(ModelFileError, match=f"{name}: not a GGUF file"):
            read_gguf(tmp_path / name)


def test_a_folder_without_permission(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    folder.chmod(0o700)
    for parent in folder.parents[:3]:
        parent.chmod(0o755)
    program = (
        "import os, sys; from headrace.checkpoint.model_folder import describe;"
        "os.setuid(65534); describe(sys.argv[1])"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "cannot be read: Permission denied" in child.stderr.splitlines()[-1]


def test_the_table_of_aliases_is_the_one_that_mlx_lm_has() -> None:
    from mlx_lm import utils

    assert families.ALIASES == utils.MODEL_REMAPPING
    assert families.ARCHITECTURE_ALIASES == utils.MODEL_ARCHITECTURE_REMAPPING
    for name in families.ALIASES.values():
        assert name in families.model_files()
