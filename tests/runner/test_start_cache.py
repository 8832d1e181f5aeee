"""What a first start proved is used by the next one, and by nobody else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.checkpoint.model_folder import describe
from headrace.config import EngineConfig
from headrace.runner import build
from headrace.runner.device import read_device
from headrace.runner.model_runner import RunnerOptions
from headrace.runner.start.cache import StartCache, StartFacts, start_key


@pytest.fixture
def model(scripted_folder: Callable[[str], Path], tmp_path: Path, own_cache: Path) -> Path:
    return Path(shutil.copytree(scripted_folder("plain"), tmp_path / "model"))


def key_of(model: Path, config: EngineConfig | None = None, *extra: object) -> str:
    return start_key(describe(str(model)), config or EngineConfig(model=str(model)), read_device(), *extra)


def test_the_key_holds_what_the_facts_depend_on(model: Path) -> None:
    key = key_of(model)
    assert key == key_of(model)
    others = [
        key_of(model, EngineConfig(model=str(model), dtype="float16")),
        key_of(model, None, "kernel"),
        start_key(
            describe(str(model)), EngineConfig(model=str(model)), replace(read_device(), name="another device")
        ),
    ]
    os.utime(model / "model.safetensors", ns=(1, 1))
    others.append(key_of(model))
    assert len({key, *others}) == 5


def test_facts_come_back_and_damage_is_nothing(model: Path) -> None:
    cache, facts = StartCache("k"), StartFacts(True, False, False, 12345)
    assert cache.read() is None
    cache.write(facts)
    assert StartCache("k").read() == facts and StartCache("other").read() is None
    wanted = RunnerOptions(compile=True, max_prefill_rows=3)
    assert facts.options(wanted) == RunnerOptions(compile=False, materialize=True, max_prefill_rows=3)
    (file,) = Path(os.environ["HEADRACE_CACHE"], "starts").glob("k.json")
    file.write_bytes(b"{")
    assert cache.read() is None


def test_what_was_measured_on_the_way_does_not_matter(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are timed at every start, and said so; the facts of the same kernels are found all the same."""
    config = EngineConfig(model=str(model), kv_memory_bytes=64 << 20, max_num_seqs=4)
    usual, keys = build.start_key, []
    monkeypatch.setattr(build, "start_key", lambda *words: keys.append(usual(*words)) or keys[-1])
    choose = build.choose_native
    for microseconds in (40, 41):
        monkeypatch.setattr(
            build,
            "choose_native",
            lambda *words, us=microseconds: replace(choose(*words), note=f"{us} us a layer"),
        )
        build.build_runner(config, lambda stage, fraction: None)
    assert len(keys) == 2 and keys[0] == keys[1]


def test_a_second_start_plans_the_same_without_the_check(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(model), kv_memory_bytes=64 << 20, max_num_seqs=4)
    first = build.build_runner(config, lambda stage, fraction: None)

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("done again")

    monkeypatch.setattr(build, "choose_options", never)
    monkeypatch.setattr(build, "measure_activation_bytes", never)
    second = build.build_runner(config, lambda stage, fraction: None)
    fixed = {name: first.ready_info.plan[name] for name in ("activations_bytes", "pool_bytes")}
    assert fixed.items() <= second.ready_info.plan.items()
    assert second.num_blocks == first.num_blocks
    os.utime(model / "config.json", ns=(1, 1))
    with pytest.raises(AssertionError, match="done again"):
        build.build_runner(config, lambda stage, fraction: None)
