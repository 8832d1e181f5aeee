"""``headrace plan``: the numbers come from the files' headers and add up; nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.checkpoint.model_folder import describe
from headrace.cli.main import main

ScriptedFolder = Callable[[str], Path]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, int]:
    assert main(["plan", *words, "--json"]) == 0
    numbers: dict[str, int] = json.loads(capsys.readouterr().out)
    return numbers


def test_the_parts_add_up_to_the_budget(
    scripted_folder: ScriptedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = scripted_folder("plain")
    numbers = plan(capsys, str(folder), "--memory-gb", "8", "--device", "cpu")
    fixed = ("weights", "activations", "attention_scratch", "buffer_cache")
    assert sum(numbers[f"{name}_bytes"] for name in fixed) + numbers["pool_bytes"] == numbers["planned_bytes"]
    assert numbers["planned_bytes"] + numbers["unused_bytes"] == numbers["budget_bytes"] <= 8 * 2**30
    assert numbers["weights_bytes"] == describe(folder).weights_bytes  # float32 in the file, float32 on the CPU


def test_flags_of_serve_count(scripted_folder: ScriptedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(scripted_folder("plain")), "--memory-gb", "8", "--device", "cpu"]
    numbers = plan(capsys, *words, "--max-cache-blocks", "100", "--block-size", "8", "--max-model-len", "512")
    assert numbers["blocks_full"] == 100 and numbers["max_model_len"] == 512
    assert plan(capsys, *words, "--max-num-seqs", "3")["sequences_at_2048"] == 3
    half = plan(capsys, *words, "--dtype", "float16")
    assert 2 * half["kv_bytes_per_token"] == numbers["kv_bytes_per_token"]


def test_the_table_names_what_does_not_fit(
    scripted_folder: ScriptedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(scripted_folder("plain")), "--memory-gb", "8", "--device", "metal"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "weights" in out and "KV pool full" in out and "beyond the model" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--memory-gb", "0.01", "--device", "cpu"], "memory"),
        (["--memory-gb", "-1"], "above 0"),
        (["--port", "1"], "unknown flag"),
        (["second-model"], "one MODEL"),
    ],
)
def test_faults_are_one_line(
    scripted_folder: ScriptedFolder, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["plan", str(scripted_folder("plain")), *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and says in err


def test_a_device_of_another_kind_needs_its_memory(
    scripted_folder: ScriptedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.runner.device import read_device

    other = "metal" if read_device().kind != "metal" else "cpu"
    assert main(["plan", str(scripted_folder("plain")), "--device", other]) == 2
    assert "--memory-gb" in capsys.readouterr().err
