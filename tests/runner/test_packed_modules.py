"""Packed weights as CUDA devices hold them: which form is chosen, and layers that give what their weights say."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

sys.path.append(str(Path(__file__).parent.parent / "checkpoint"))

from checkpoint_files import CONFIG, tiny_weights, write_checkpoint

from headrace.checkpoint.model_folder import describe
from headrace.config import EngineConfig
from headrace.core.memory_plan import DeviceMemory
from headrace.errors import StartupError
from headrace.runner.estimate import estimate
from headrace.runner.loading.loader import LoadedModel, candidate_forms, load_model, outline_model
from headrace.runner.mlx_lm_adapter import build_model
from headrace.runner.products.choice import MEASURED_ROWS, SmallRowsKernel
from headrace.runner.products.packed_weights import PackedWeights, wide
from headrace.runner.products.small_rows import (
    LEAST_UNPACKED,
    MAX_ROWS,
    Dense,
    Norm,
    Product,
    Products,
    largest_difference,
    plain_product,
    unpacking_product,
)
from headrace.runner.substitutions.fused_linear import FusedPart, fuse_projections
from headrace.runner.substitutions.moe_decode import Experts, ExpertsChoice, ExpertsFeedForward, expected_change
from headrace.runner.substitutions.packed_linear import (
    PackedEmbedding,
    PackedLinear,
    PackedSwitchLinear,
    hold_packed,
    substitute_packed,
)

PROMPT = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
BF16, F32 = mx.bfloat16, mx.float32


def packed_folder(folder: Path, mode: str = "affine", odd: dict[str, Any] | None = None) -> Path:
    """A checkpoint packed by MLX with 4 bits by 32; ``odd``: layers that are packed in another way or not."""
    model = build_model("llama", CONFIG)
    model.load_weights([(name, mx.array(value).astype(BF16)) for name, value in tiny_weights().items()])
    others = odd or {}
    nn.quantize(
        model,
        32,
        4,
        mode=mode,
        class_predicate=lambda path, module: others.get(path, hasattr(module, "to_quantized")),
    )
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    quantization = {"bits": 4, "group_size": 32, "mode": mode, **others}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization": quantization}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(describe(folder), device="cuda", **options)


def kinds(model: nn.Module, kind: type) -> list[Any]:
    return [module for _, module in model.named_modules() if type(module) is kind]


# -- which form ----------------------------------------------------------------------------------------


def test_forms_for_kernels_by_wish() -> None:
    def names(dtype: mx.Dtype | None, keep: bool | None, **kernels: bool) -> list[Any]:
        return [form.kernels or form.packed for form in candidate_forms("cuda", dtype, keep, True, **kernels)]

    assert names(None, None, kernels=True) == names(BF16, None, kernels=True) == ["both", "packed"]
    assert names(None, True, kernels=True) == ["packed"]
    assert names(None, False, kernels=True) == [False]
    assert names(F32, None, kernels=True) == names(None, None, kernels=False) == [False, True]


def test_memory_decides_whether_plain_weights_are_beside(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path / "m")
    stored = describe(folder).weights_bytes
    both = load(folder)
    assert load(folder, memory_budget_bytes=int(both.weights_bytes / 0.69)).weights_bytes == both.weights_bytes
    for packed in (
        load(folder, memory_budget_bytes=int(both.weights_bytes / 0.71)),
        load(folder, memory_budget_bytes=stored),
        load(folder, keep_quantized=True),
    ):
        assert packed.packed and packed.weights_bytes == stored
        assert all("weight" not in layer for layer in kinds(packed.model, PackedLinear))
    assert all("weight" in layer for layer in kinds(both.model, PackedLinear))
    for loaded in (both, packed):
        assert len(kinds(loaded.model, PackedLinear)) == 2 * 7 + 1
        assert len(kinds(loaded.model, PackedEmbedding)) == 1
    with pytest.raises(StartupError, match="the weights take"):
        load(folder, memory_budget_bytes=stored // 2)
    unpacked = load(folder, keep_quantized=False)
    assert not unpacked.packed and len(kinds(unpacked.model, nn.Linear)) == 2 * 7 + 1


def test_the_plan_and_the_start_say_what_is_held(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path / "m")
    for keep, text in ((None, ", and bfloat16 beside it ("), (True, "held as packed (4 bits, scales bfloat16) (")):
        files = describe(folder)
        _, plan = outline_model(files, device="cuda", dtype="auto", keep_quantized=keep, memory_budget_bytes=None)
        loaded = load(folder, keep_quantized=keep)
        assert loaded.weights_bytes == plan.nbytes
        assert loaded.dtype == "bfloat16" and text in loaded.notes[-1]
    plain = sum(value.size for name, value in tiny_weights().items() if "proj" in name or "head" in name)
    assert load(folder).weights_bytes == files.weights_bytes + 2 * plain


def test_the_estimate_is_what_a_start_holds(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path / "m")
    device = DeviceMemory(kind="cuda", total=1 << 34, working_set=1 << 34, free=1 << 34)
    for keep, form in ((None, "packed, 4 bits, and bfloat16"), (True, "packed, 4 bits"), (False, "bfloat16")):
        config = EngineConfig(model=str(folder), keep_quantized=keep)
        found = estimate(describe(folder), config, device)
        assert found.form == form
        assert found.fixed.weights == load(folder, keep_quantized=keep).weights_bytes


def test_all_forms_are_the_same_model(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path / "m", odd={"model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 32}})
    exact = load(folder, keep_quantized=False, dtype="float32").model(PROMPT)
    for keep in (None, True, False):
        logits = load(folder, keep_quantized=keep).model(PROMPT)
        assert largest_difference(logits, exact) < 3e-2


def test_what_kernels_do_not_take(tmp_path: Path) -> None:
    """Plain beside packed layers where there is room for both, as in the files elsewhere."""
    odd = {"model.layers.0.mlp.up_proj": {"bits": 3, "group_size": 32}, "lm_head": False}
    folder = packed_folder(tmp_path / "m", odd=odd)
    for keep, kind in ((None, nn.Linear), (True, nn.QuantizedLinear)):
        model = load(folder, keep_quantized=keep).model
        assert type(model.layers[0].mlp.up_proj) is kind
        assert type(model.lm_head) is nn.Linear and type(model.layers[1].mlp.up_proj) is PackedLinear
    model = load(packed_folder(tmp_path / "fp4", mode="mxfp4"))
    assert not model.packed and not kinds(model.model, PackedLinear)
    plain = load(write_checkpoint(tmp_path / "plain"))
    assert not plain.packed and not kinds(plain.model, PackedLinear)


# -- layers --------------------------------------------------------------------------------------------


def packed_of(*shape: int, bits: int = 4, group: int = 32, dtype: mx.Dtype = F32) -> PackedWeights:
    weights = (mx.random.normal(shape) * shape[-1] ** -0.5).astype(dtype)
    return PackedWeights(*mx.quantize(weights, group_size=group, bits=bits), bits, group)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("rows", [1, LEAST_UNPACKED, MAX_ROWS + 1])
def test_linear_layers(both: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many rows without MLX's product over packed weights, which it would compile for half a minute."""
    packed, bias = packed_of(32, 64), mx.random.normal((32,))
    x = mx.random.normal((2, rows, 64))
    expected = x @ wide(packed).T + bias
    layer = PackedLinear(packed, packed.unpacked() if both else None, bias)
    if both or 2 * rows >= LEAST_UNPACKED:
        monkeypatch.setattr(mx, "quantized_matmul", lambda *_, **__: pytest.fail("called"))
    for products in (None, SmallRowsKernel(plain_product)):
        if products is not None:
            layer.use(products)
        assert largest_difference(layer(x), expected) < 1e-5


def test_few_rows_of_packed_layers_go_to_the_kernel() -> None:
    """Where it is right: it then needs no comparison with MLX's product. Elsewhere it is not used."""
    calls: list[int] = []

    def own(error: float) -> Products:
        def run(x: mx.array, product: Product) -> mx.array:
            calls.append(x.shape[0])
            return unpacking_product(x, product) * (1 + error)

        return run

    for error, used in ((0.0, True), (0.5, False)):
        model = nn.Sequential(PackedLinear(packed_of(32, 64, dtype=BF16)))
        products = SmallRowsKernel(own(error))
        assert substitute_packed(model, products, ["layers."]) == 1
        assert bool(products.faults) != used
        calls.clear()
        for rows in (1, 9, MAX_ROWS, MAX_ROWS + 1):
            model(mx.ones((rows, 64), BF16))
        assert calls == ([1, 9, MAX_ROWS] if used else [])


def test_projections_are_fused_packed(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path / "m", odd={"model.layers.1.mlp.up_proj": {"bits": 8, "group_size": 32}})
    loaded = load(folder)
    expected = loaded.model(PROMPT)
    assert fuse_projections(loaded.model) == 3  # 4 and 8 bits do not go together
    assert type(loaded.model.layers[0].self_attn.q_proj) is FusedPart
    assert type(loaded.model.layers[1].mlp.up_proj) is PackedLinear
    assert largest_difference(loaded.model(PROMPT), expected) < 2e-2
    assert sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters())) == loaded.weights_bytes


def test_embeddings() -> None:
    plain = nn.Embedding(40, 64)
    usual = nn.QuantizedEmbedding.from_embedding(plain, group_size=32, bits=8)
    packed = PackedWeights.of(usual)
    assert packed is not None and packed.shape == (40, 64)
    layer = PackedEmbedding(packed)
    assert mx.array_equal(layer(PROMPT), usual(PROMPT)).item()
    x = mx.random.normal((3, 64))
    assert largest_difference(layer.as_linear(x), usual.as_linear(x)) < 1e-5


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("tokens", [1, 20])
def test_experts_layers(both: bool, tokens: int) -> None:
    linear = SwitchLinear(64, 32, 6, bias=True)
    usual = linear.to_quantized(group_size=32, bits=4)
    packed = PackedWeights.of(usual)
    assert isinstance(usual, QuantizedSwitchLinear) and packed is not None
    layer = PackedSwitchLinear(packed, packed.unpacked() if both else None, usual.bias)
    x = mx.random.normal((tokens, 1, 1, 64))
    chosen = mx.array(np.random.default_rng(0).integers(0, 6, (tokens, 3)).astype(np.uint32))
    assert largest_difference(layer(x, chosen), usual(x, chosen)) < 1e-5


def test_a_layer_that_differs_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    right = PackedWeights.unpacked
    monkeypatch.setattr(PackedWeights, "unpacked", lambda self: right(self) + 0.1)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(64, 32))
    nn.quantize(model, group_size=32, bits=4)
    paths = ["layers.0", "layers.1"]
    with caplog.at_level(logging.WARNING, "headrace.runner"):
        assert hold_packed(model, paths, paths) == 0
    assert len(caplog.records) == 1 and "stay as they are: over packed weights, products differ by" in caplog.text
    assert len(kinds(model, nn.QuantizedLinear)) == 2
    assert hold_packed(model, paths, []) == 2  # these do not need plain weights


# -- the check of experts ------------------------------------------------------------------------------


def packed_experts(dtype: mx.Dtype) -> ExpertsFeedForward:
    """Experts of a Qwen3 mixture; the unmodified module's part is not called."""
    matrices = packed_of(16, 64, 128, dtype=dtype), packed_of(16, 64, 128, dtype=dtype)
    down = packed_of(16, 128, 64, dtype=dtype)
    norm = Norm((1 + 0.1 * mx.random.normal((128,))).astype(dtype), 1e-6)
    router = Dense(None, None, packed_of(16, 128, bits=8, dtype=dtype))
    held = Experts(norm, router, None, None, None, 3, True, (*matrices, down))
    choice = ExpertsChoice(dtypes=[dtype])
    module = nn.Module()
    module.switch_mlp = nn.Module()
    module.switch_mlp.gate_proj = PackedSwitchLinear(matrices[0])
    return ExpertsFeedForward(held, module, choice)


def test_the_expected_change_is_the_model_s() -> None:
    mx.random.seed(3)
    half = packed_experts(F32)
    experts = half.experts
    h = mx.random.normal((5, 1, 128))
    change, settled = expected_change(h, experts)
    x = mx.fast.rms_norm(h, experts.norm.weight, experts.norm.eps)[:, 0]
    shares = np.array(mx.softmax(x @ wide(experts.router.held).T, axis=-1))
    gate, up, down = (np.array(wide(matrix)) for matrix in experts.matrices)
    rows = np.array(x)
    for row in range(5):
        best = np.argsort(-shares[row])[:3]
        total = np.zeros(128)
        for expert in best:
            g, u = gate[expert] @ rows[row], up[expert] @ rows[row]
            total += shares[row][expert] / shares[row][best].sum() * (down[expert] @ (g / (1 + np.exp(-g)) * u))
        assert np.abs(np.array(change)[row, 0] - total).max() < 1e-4 * np.abs(total).max()
    assert settled.shape == (5, 1, 1)


@pytest.mark.parametrize(("error", "right"), [(0.0, True), (0.005, True), (0.1, False), (float("nan"), False)])
def test_experts_are_held_against_exact_values(error: float, right: bool) -> None:
    """A kernel is neither refused nor accepted for how MLX's own products round."""
    mx.random.seed(4)
    half = packed_experts(BF16)

    def kernel(h: mx.array, experts: Experts, products: Products) -> mx.array:
        change, _ = expected_change(h, experts)
        return (h.astype(F32) + change * (1 + error)).astype(h.dtype)

    choice = ExpertsChoice(lambda: kernel, dtypes=[BF16])
    choice.measure([half], plain_product)
    assert choice.note().startswith(
        f"experts: kernel for {len(MEASURED_ROWS) if right else 0} of {len(MEASURED_ROWS)} measured"
    )
    assert ("differs by" in choice.note()) != right
    assert (choice.of(mx.zeros((5, 1, 128), BF16), half.experts) is not None) == right
