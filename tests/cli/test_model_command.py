"""``headrace model inspect|acquire`` as people type it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "checkpoint"))

from checkpoint_files import CONFIG, tiny_weights, write_checkpoint
from gguf_files import QTYPE, write_llama
from hub_server import REVISION, Repository, hub

from headrace.cli.main import main


@pytest.fixture
def remote(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A sharded checkpoint on a stub hub; the cache folder is the test's own."""
    from huggingface_hub import constants

    folder = write_checkpoint(tmp_path / "source", shards=2)
    repository = Repository({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    with hub(repository) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield repository


def _inspected(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["model", "inspect", *words]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def _parameters() -> int:
    return sum(value.size for value in tiny_weights().values())


def test_inspect_tells_family_tier_memory_and_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = _inspected(capsys, str(write_checkpoint(tmp_path / "m", shards=2)))
    family = report["family"]
    assert (family["type"], family["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert (family["max_context"], family["parameters"]) == (128, _parameters())
    assert (family["quantization"], family["vision"], family["mtp"]) == (None, False, False)
    # 2 layers of K and V, 2 heads of 16 float32 values
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert family["layer_groups"] == [
        {"name": "full", "layers": 2, "window": None, "kv_bytes_per_token": report["kv_bytes_per_token"]}
    ]
    assert report["tier"]["name"] == "paged"
    assert report["fit"]["fits"] is True
    assert report["fit"]["weights_bytes"] == 4 * _parameters()
    assert {entry["name"] for entry in report["files"]} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert report["source"] is None
    assert report["warnings"] == []


def test_inspect_counts_the_parameters_of_packed_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_llama(tmp_path / "m.gguf", CONFIG, tiny_weights(), QTYPE.Q8_0)
    report = _inspected(capsys, str(path))
    assert report["family"]["parameters"] == _parameters()
    assert report["family"]["quantization"]["types"] == ["Q8_0"]
    assert report["family"]["quantization"]["bits_per_weight"] == pytest.approx(8.5, abs=0.2)


def test_inspect_of_other_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recurrent model is described honestly and said not to be served; its weights are not looked at."""
    config = {
        "model_type": "mamba",
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 4,
        "num_hidden_layers": 2,
        "conv_kernel": 3,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "tie_word_embeddings": False,
    }
    report = _inspected(capsys, str(write_checkpoint(tmp_path / "m", config, tiny_weights())))
    assert report["tier"]["name"] == "hybrid"
    assert report["served"] is False
    assert report["fit"]["fits"] is False
    assert report["kv_bytes_per_token"] is None


def _cut(folder: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (_cut, "model-00002-of-00002.safetensors: incomplete"),
        (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), "incomplete"),
        (
            lambda folder: (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 41})),
            "vocab_size",
        ),
    ],
)
def test_inspect_refuses_what_serve_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_it: Callable[[Path], Any], message: str
) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=2)
    break_it(folder)
    assert main(["model", "inspect", str(folder)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_inspect_of_a_hub_id_fetches_no_weights(remote: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    report = _inspected(capsys, "owner/model")
    assert (report["source"], report["revision"]) == ("owner/model", REVISION)
    assert report["family"]["parameters"] == _parameters()
    sizes = {entry["name"]: entry["bytes"] for entry in report["files"]}
    for name, content in remote.files.items():
        assert sizes[name] == len(content)


def test_acquire_prints_where_the_model_is_and_inspect_names_its_source(
    remote: Repository, tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "models" / "it"
    assert main(["model", "acquire", "owner/model", "--target-dir", str(target)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{target}\n"
    assert "MB" in captured.err
    report = _inspected(capsys, str(target))
    assert (report["source"], report["revision"]) == ("owner/model", REVISION)
    assert main(["model", "acquire", "owner/model"]) == 0
    assert capsys.readouterr().out == f"{own_cache / 'models' / 'owner--model'}\n"


def test_faults_are_one_line_and_leave_nothing(
    remote: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "models" / "it"
    remote.faults["model-00002-of-00002.safetensors"] = "html"
    words = ["model", "acquire", "owner/model", "--target-dir", str(target), "--download-retries", "0"]
    assert main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("headrace model: model-00002-of-00002.safetensors: ")
    assert not target.exists()
    assert main(["model", "inspect", str(target)]) == 2
    assert "incomplete" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect"], "required: model"),
        (["acquire", "no-hub-id"], "not a hub id"),
        (["convert", "x"], "convert: not available yet"),
        (["inspect", "/nowhere/at/all"], "no such file or folder"),
        (["grow"], "grow"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["model", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
