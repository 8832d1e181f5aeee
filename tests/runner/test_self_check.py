"""The check at load: ways that are right pass, and whatever is wrong in them is found, packed KV included."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_decoder_block import FunctionalRotate, WrongPacking
from tiny_models import CONFIGS, VOCAB, tiny_model

from headrace.errors import StartupError
from headrace.runner.attention import slices
from headrace.runner.attention.dispatch import install
from headrace.runner.forwards.logits_head import substitute_head
from headrace.runner.kv.layout import read_layout
from headrace.runner.kv.packing import Packed, VectorPacking
from headrace.runner.kv.pool import KVPool
from headrace.runner.model_runner import RunnerOptions
from headrace.runner.products.choice import SmallRowsKernel
from headrace.runner.products.small_rows import plain_product
from headrace.runner.start import self_check
from headrace.runner.start.packed_check import packed_fault
from headrace.runner.start.self_check import choose_options
from headrace.runner.substitutions.block_check import BlockTools, substitute_decoder_blocks
from headrace.runner.substitutions.decoder_block import FusedBlock
from headrace.runner.substitutions.fused_linear import fuse_projections
from headrace.runner.substitutions.moe_decode import ExpertsChoice

WANTED = RunnerOptions(compile=False)
BITS = {"int8": 8, "int4": 4}


def model_of(name: str, dtype: mx.Dtype) -> Any:
    model = tiny_model(name)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def fault_of(model: Any, kv_cache_dtype: str, head_major: bool, options: RunnerOptions = WANTED) -> str:
    install()
    found = read_layout(model, 16, kv_cache_dtype)
    selector, _ = substitute_head(model)
    return packed_fault(model, selector, found, VOCAB, options, head_major=head_major, store=None)


@pytest.fixture(autouse=True)
def wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a group's size: smaller ones are not packed beside 16-bit vectors."""
    for name in ("qwen3", "gemma3_text", "gemma2"):
        monkeypatch.setitem(CONFIGS, name, CONFIGS[name] | {"head_dim": 64})


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("kv_cache_dtype", BITS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("head_major", [True, False])
def test_packed_kv_passes(name: str, kv_cache_dtype: str, dtype: mx.Dtype, head_major: bool) -> None:
    assert fault_of(model_of(name, dtype), kv_cache_dtype, head_major) == ""


@pytest.mark.parametrize("kv_cache_dtype", BITS)
@pytest.mark.parametrize("head_major", [True, False])
def test_packed_kv_of_a_model_with_its_own_attention_passes(kv_cache_dtype: str, head_major: bool) -> None:
    options = replace(WANTED, materialize=True, single_rows=True)
    assert fault_of(model_of("gemma2", mx.float32), kv_cache_dtype, head_major, options) == ""


@pytest.mark.parametrize("head_dim", [40, 80, 96])
def test_padded_heads_pass(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    monkeypatch.setitem(CONFIGS, "odd", CONFIGS["qwen3"] | {"model_type": "qwen3", "head_dim": head_dim})
    for head_major in (True, False):
        assert fault_of(model_of("odd", mx.float32), "int4", head_major) == ""


@pytest.mark.parametrize("kv_cache_dtype", BITS)
def test_fused_blocks_over_packed_pools_are_part_of_the_check(kv_cache_dtype: str) -> None:
    model = model_of("qwen3", mx.bfloat16)
    install()
    fuse_projections(model)
    for rotate, right in ((FunctionalRotate(), True), (WrongPacking("order of codes"), False)):
        blocks = BlockTools(SmallRowsKernel(plain_product), rotate, None, ExpertsChoice(), timed=False)
        # Blocks that were checked over 16-bit pools only: what they do to packed ones is seen here.
        assert substitute_decoder_blocks(model, blocks)[0] == 2
        rotate.calls = 0
        assert (fault_of(model, kv_cache_dtype, False) == "") == right
        assert rotate.calls > 0
        for path, block in [(p, m) for p, m in model.named_modules() if isinstance(m, FusedBlock)]:
            model.update_modules(nn.utils.tree_unflatten([(path, block.inner)]))


# -- what must be found ----------------------------------------------------------------------------------


def swap_scales(pack: Callable[..., Packed]) -> Callable[..., Packed]:
    """Keys and values are stored with the scale of the token before."""

    def wrong(self: VectorPacking, x: mx.array) -> Packed:
        packed = pack(self, x)
        return packed._replace(scales=mx.roll(packed.scales, 1, axis=-2))

    return wrong


def a_step_off(pack: Callable[..., Packed]) -> Callable[..., Packed]:
    """Every code is one too high: half a percent of the range, which a bound on logits would let pass."""

    def wrong(self: VectorPacking, x: mx.array) -> Packed:
        packed = pack(self, x)
        return packed._replace(biases=packed.biases + 3 * packed.scales)

    return wrong


@pytest.mark.parametrize("damage", [swap_scales, a_step_off])
@pytest.mark.parametrize("head_major", [True, False])
def test_wrong_writes_are_found(
    monkeypatch: pytest.MonkeyPatch, damage: Callable[..., Any], head_major: bool
) -> None:
    monkeypatch.setattr(VectorPacking, "pack", damage(VectorPacking.pack))
    assert "stored vectors are off" in fault_of(model_of("qwen3", mx.float32), "int8", head_major)


def test_a_write_to_another_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = KVPool.write

    def wrong(self: KVPool, layer: int, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        write(self, layer, mx.where(slots == 17, 16, slots), keys, values)

    monkeypatch.setattr(KVPool, "write", wrong)
    for head_major in (True, False):
        assert fault_of(model_of("qwen3", mx.float32), "int8", head_major) != ""


def without_bias(scores: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def wrong(query: mx.array, keys: Packed, packing: VectorPacking) -> mx.array:
        return scores(query, keys._replace(biases=keys.biases * 0.9), packing)

    return wrong


@pytest.mark.parametrize("kv_cache_dtype", BITS)
def test_wrong_reads_are_found_and_a_slower_way_is_taken(
    monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Unpacked pools pass: what is wrong is wrong only with packed keys."""
    monkeypatch.setattr(slices, "packed_scores", without_bias(slices.packed_scores))
    model = model_of("qwen3", mx.float32)
    assert fault_of(model, kv_cache_dtype, True) != ""
    options = choose(model, kv_cache_dtype)
    assert options.materialize, "arrays are unpacked in another way, which is right"
    (line,) = caplog.messages
    assert "slower way" in line


def test_a_slower_way_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    trial = self_check.run_trial

    def picky(*arguments: Any, **more: Any) -> Any:
        if not arguments[4].materialize:
            raise TypeError("the model brings its own attention mask")
        return trial(*arguments, **more)

    monkeypatch.setattr(self_check, "run_trial", picky)
    caplog.set_level("INFO", logger="headrace.runner")
    assert choose(model_of("qwen3", mx.float32), "auto").materialize
    assert [line for line in caplog.messages if "slower way" in line and "its own attention mask" in line]


def test_nothing_right_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VectorPacking, "pack", swap_scales(VectorPacking.pack))
    with pytest.raises(StartupError, match=r"--kv-cache-dtype int4: .* leave the flag out") as caught:
        choose(model_of("qwen3", mx.float32), "int4")
    assert "\n" not in str(caught.value)


def test_wrong_gathers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = VectorPacking.unpack

    def wrong(self: VectorPacking, packed: Packed, dtype: mx.Dtype) -> mx.array:
        return unpack(self, packed, dtype) * 1.1

    monkeypatch.setattr(VectorPacking, "unpack", wrong)
    assert fault_of(model_of("qwen3", mx.float32), "int8", False) != ""


def choose(model: Any, kv_cache_dtype: str) -> RunnerOptions:
    install()
    found = read_layout(model, 16, kv_cache_dtype)
    selector, _ = substitute_head(model)
    return choose_options(model, selector, found, VOCAB, head_major=True, wanted=WANTED)
