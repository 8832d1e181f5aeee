"""Experts over narrow weights: right, the same for a row in any company, and held in the bytes of the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import CONFIGS, tiny_model

from headrace.checkpoint.model_folder import describe
from headrace.config import EngineConfig
from headrace.core.machine import cpu_features
from headrace.core.memory_plan import DeviceMemory
from headrace.errors import StartupError
from headrace.runner.cpu import experts as cpu_experts
from headrace.runner.cpu import products as cpu_products
from headrace.runner.cpu.experts import ACTIVATIONS, SILU, reference
from headrace.runner.cpu.narrow_weights import (
    Activation,
    NarrowProducts,
    NarrowStack,
    interleaved_biases,
)
from headrace.runner.cpu.products import Measured, NarrowChoice
from headrace.runner.estimate import estimate
from headrace.runner.kernels import native_extension
from headrace.runner.loading.loader import LoadedModel, load_model
from headrace.runner.loading.packing import Packing, with_eight_bits
from headrace.runner.substitutions.modules import calls_only
from headrace.runner.substitutions.narrow_experts import (
    KINDS,
    NarrowSwitchGLU,
    NarrowSwitchLinear,
    substitute_narrow_experts,
)
from headrace.runner.substitutions.weighted_experts import WeightedExperts, substitute_weighted_experts

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="experts of the CPU")

ALL = ("packed", "plain", "experts")
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
FORMS = [(16, 1, "float16"), (16, 1, "bfloat16")] + [
    (bits, group, scale) for bits in (4, 8) for group in (32, 64) for scale in ("float16", "bfloat16", "float32")
]
ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3")


@cache
def native() -> NarrowProducts:
    return NarrowProducts(cpu_products._load())


@pytest.fixture(scope="module")
def products() -> NarrowProducts:
    try:
        return native()
    except native_extension.ExtensionError as error:
        pytest.skip(f"the extension cannot be built here: {error}")


def stack_of(
    bits: int, group: int, scale: str, experts: int, outputs: int, inputs: int, seed: int
) -> tuple[NarrowStack, np.ndarray]:
    """Random matrices and their values in float64."""
    source = np.random.default_rng(seed)
    values = mx.array((0.3 * source.standard_normal((experts, outputs, inputs))).astype(np.float32))
    if bits == 16:
        plain = values.astype(DTYPES[scale])
        return native().plain_stack(plain), np.array(plain.astype(mx.float32), dtype=np.float64)
    words, scales, biases = mx.quantize(values, group_size=group, bits=bits)
    scales, biases = scales.astype(DTYPES[scale]), biases.astype(DTYPES[scale])
    wide = scales.astype(mx.float32), biases.astype(mx.float32)
    weights = mx.dequantize(words, *wide, group_size=group, bits=bits)
    return native().packed_stack(words, scales, biases, bits), np.array(weights, dtype=np.float64)


def experts_of(bits: int, group: int, scale: str, experts: int = 6, width: int = 128, hidden: int = 64) -> Any:
    """Gate and up in turns, down, and the weights of all three."""
    gate, up, down = (
        stack_of(bits, group, scale, experts, *shape, seed)
        for seed, shape in enumerate(((hidden, width), (hidden, width), (width, hidden)))
    )
    return native().interleaved_stacks(gate[0], up[0]), down[0], (gate[1], up[1], down[1])


def rows_of(rows: int, experts: int, choices: int, width: int = 128) -> tuple[mx.array, mx.array, mx.array]:
    source = np.random.default_rng(rows)
    x = source.standard_normal((rows, width)).astype(np.float32)
    chosen = np.argsort(source.random((rows, experts)), axis=-1)[:, :choices].astype(np.int32)
    return mx.array(x), mx.array(chosen), mx.array(source.random((rows, choices)).astype(np.float32))


def close(got: mx.array, expected: np.ndarray, share: float = 3e-4) -> bool:
    return bool(np.abs(np.array(got) - expected).max() < share * np.abs(expected).max())


# -- mixtures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group", "scale"), FORMS)
def test_mixtures_are_those_of_float64(products: NarrowProducts, bits: int, group: int, scale: str) -> None:
    gate_up, down, weights = experts_of(bits, group, scale)
    for rows in (1, 2, 9, 60, 300):
        x, chosen, shares = rows_of(rows, 6, 2)
        expected = reference(np.array(x), np.array(chosen), weights, SILU)
        assert close(products.mixture(x, chosen, gate_up, down, SILU), expected)
        summed = np.einsum("rcd,rc->rd", expected, np.array(shares))
        assert close(products.mixture(x, chosen, gate_up, down, SILU, shares=shares), summed)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("hidden", [96, 41, 7])
def test_activations_and_biases(products: NarrowProducts, activation: Activation, hidden: int) -> None:
    gate_up, down, weights = experts_of(16, 1, "bfloat16", hidden=hidden)
    source = np.random.default_rng(1)
    biases = [source.standard_normal((6, size)).astype(np.float32) for size in (hidden, hidden, 128)]
    given = interleaved_biases(mx.array(biases[0]), mx.array(biases[1])), mx.array(biases[2])
    x, chosen, _ = rows_of(33, 6, 3)
    x = 4 * x  # far enough for the limit
    for both, biased in ((None, None), (given, biases)):
        expected = reference(np.array(x), np.array(chosen), weights, activation, biased)
        assert close(products.mixture(x, chosen, gate_up, down, activation, biases=both), expected, 2e-5)


@pytest.mark.parametrize(
    ("bits", "group", "scale"), [(16, 1, "bfloat16"), (4, 32, "float16"), (8, 64, "bfloat16")]
)
def test_a_row_is_the_same_in_any_company(products: NarrowProducts, bits: int, group: int, scale: str) -> None:
    gate_up, down, _ = experts_of(bits, group, scale)
    x, chosen, shares = rows_of(700, 6, 3)

    def run(rows: slice, weighted: bool) -> mx.array:
        given = shares[rows] if weighted else None
        return products.mixture(x[rows], chosen[rows], gate_up, down, SILU, shares=given)

    for weighted in (False, True):
        together = run(slice(None), weighted)
        for count in (1, 2, 5, 8, 31, 256):
            assert mx.array_equal(run(slice(0, count), weighted), together[:count]).item()
        for row in (3, 77, 699):
            assert mx.array_equal(run(slice(row, row + 1), weighted), together[row : row + 1]).item()


def test_rows_that_choose_alike_or_twice(products: NarrowProducts) -> None:
    gate_up, down, weights = experts_of(4, 32, "float16")
    x, chosen, _ = rows_of(50, 6, 2)
    for one in (mx.full(chosen.shape, 5, mx.int32), mx.where(mx.arange(50)[:, None] < 49, 0, chosen)):
        assert close(
            products.mixture(x, one, gate_up, down, SILU),
            reference(np.array(x), np.array(one), weights, SILU),
        )


def test_many_rows_pass_in_blocks(products: NarrowProducts) -> None:
    """More than fits between the two passes at a time."""
    gate_up, down, _ = experts_of(4, 32, "float16")
    x, chosen, shares = rows_of(60_000, 6, 1)
    whole = products.mixture(x, chosen, gate_up, down, SILU, shares=shares)
    for first in (0, 29_990, 59_980):
        part = slice(first, first + 20)
        alone = products.mixture(x[part], chosen[part], gate_up, down, SILU, shares=shares[part])
        assert mx.array_equal(alone, whole[part]).item()


def test_shapes_of_a_batch_and_no_rows(products: NarrowProducts) -> None:
    gate_up, down, _ = experts_of(16, 1, "float16")
    x, chosen, shares = rows_of(24, 6, 2)
    flat = products.mixture(x, chosen, gate_up, down, SILU, shares=shares)
    shaped = products.mixture(
        x.reshape(2, 3, 4, 128),
        chosen.reshape(2, 3, 4, 2),
        gate_up,
        down,
        SILU,
        shares=shares.reshape(2, 3, 4, 2),
    )
    assert shaped.shape == (2, 3, 4, 128)
    assert mx.array_equal(shaped.reshape(24, 128), flat).item()
    assert products.mixture(x[:0], chosen[:0], gate_up, down, SILU).shape == (0, 2, 128)


THREADED = """
import sys
from headrace.runner.cpu import blas
blas.prepare()
import mlx.core as mx
from headrace.runner.cpu import products as cpu_products
from headrace.runner.cpu.experts import ACTIVATIONS
from headrace.runner.cpu.narrow_weights import NarrowForm, NarrowProducts, NarrowStack
given = mx.load(sys.argv[1])
products = NarrowProducts(cpu_products._load())
gate_up = NarrowStack(NarrowForm(4, 32, "float16", 128, 128), given["gate_up"])
down = NarrowStack(NarrowForm(4, 32, "float16", 64, 128), given["down"])
for _ in range(20):
    y = products.mixture(given["x"], given["chosen"], gate_up, down, ACTIVATIONS[0], shares=given["shares"])
    assert mx.array_equal(y, given["y"]).item()
print(products.threads)
"""


@pytest.mark.slow
def test_threads_change_no_bit(tmp_path: Path, products: NarrowProducts) -> None:
    gate_up, down, _ = experts_of(4, 32, "float16")
    for rows in (1, 8, 900):
        x, chosen, shares = rows_of(rows, 6, 2)
        y = products.mixture(x, chosen, gate_up, down, SILU, shares=shares)
        names = {
            "x": x,
            "chosen": chosen,
            "shares": shares,
            "y": y,
            "gate_up": gate_up.strips,
            "down": down.strips,
        }
        mx.save_safetensors(str(tmp_path / f"{rows}.safetensors"), names)
        command = [sys.executable, "-c", THREADED, str(tmp_path / f"{rows}.safetensors")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def test_wrong_arguments_are_refused(products: NarrowProducts) -> None:
    gate_up, down, _ = experts_of(16, 1, "float16")
    x, chosen, shares = rows_of(4, 6, 2)
    with pytest.raises(ValueError, match="choices and shares"):
        products.mixture(x, chosen[:3], gate_up, down, SILU)
    with pytest.raises(ValueError, match="choices and shares"):
        products.mixture(x, chosen, gate_up, down, SILU, shares=shares[:, :1])
    with pytest.raises(ValueError, match="size"):
        products.mixture(x, chosen, NarrowStack(gate_up.form, gate_up.strips[:, :1]), down, SILU)


# -- products in place of mlx-lm's -----------------------------------------------------------------------


def switch_linears(bits: int, bias: bool) -> Any:
    """A layer as it is loaded, and the same in float32."""
    mx.random.seed(3)
    layer = SwitchLinear(128, 48, 5, bias=bias)
    if bias:
        layer.bias = mx.random.normal((5, 48))
    if bits == 16:
        layer.set_dtype(mx.bfloat16)
    else:
        layer = layer.to_quantized(group_size=32, bits=bits)
    wide = SwitchLinear(128, 48, 5, bias=bias)
    wide.weight = layer.weight.astype(mx.float32)
    if bits != 16:
        wide.weight = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=bits)
    if bias:
        wide.bias = layer.bias.astype(mx.float32)
    return layer, wide


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_experts_linear_layers(products: NarrowProducts, bits: int, bias: bool) -> None:
    layer, wide = switch_linears(bits, bias)
    model = nn.Module()
    model.layers = [layer]
    assert substitute_narrow_experts(model, products) == 1
    narrow = model.layers[0]
    assert type(narrow) is NarrowSwitchLinear
    for x_shape, indices in (
        ((3, 1, 1, 128), mx.array([[0, 4], [2, 2], [1, 0]])),
        ((3, 2, 1, 128), mx.array([[0, 4], [2, 2], [1, 0]])),
        ((7, 1, 128), mx.array([0, 0, 1, 2, 2, 4, 4])),
        ((2, 3, 128), mx.array([3, 1])),
        ((1, 3, 128), mx.array([3, 1])),
    ):
        x = mx.random.normal(x_shape)
        got, expected = narrow(x, indices, sorted_indices=True), wide(x, indices)
        assert got.shape == expected.shape
        assert close(got, np.array(expected))


def test_a_wrong_product_ends_the_start(products: NarrowProducts) -> None:
    class Wrong(NarrowProducts):
        def expert_products(self, *arguments: Any) -> mx.array:
            return 1.1 * super().expert_products(*arguments)

    model = nn.Module()
    model.experts = switch_linears(4, False)[0]
    with pytest.raises(StartupError, match="experts: start with --dequantize"):
        substitute_narrow_experts(model, Wrong(products._module))


class Odd(SwiGLU):
    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        return mx.tanh(gate) * x


@pytest.mark.parametrize("activation", [Odd(), SwiGLU()])
def test_other_activations_stay_the_modules_own(
    products: NarrowProducts, caplog: pytest.LogCaptureFixture, activation: nn.Module
) -> None:
    wide, narrow = (SwitchGLU(64, 32, 4, activation=activation) for _ in range(2))
    narrow.set_dtype(mx.bfloat16)
    wide.load_weights([(name, value.astype(mx.float32)) for name, value in tree_flatten(narrow.parameters())])
    model = nn.Module()
    model.switch_mlp = narrow
    caplog.set_level("INFO")
    substitute_narrow_experts(model, products)
    assert ("its activation Odd" in caplog.text) == isinstance(activation, Odd)
    assert type(model.switch_mlp) is (SwitchGLU if isinstance(activation, Odd) else NarrowSwitchGLU)
    x, chosen, _ = rows_of(70, 4, 2, width=64)  # enough pairs for the module to sort them
    assert close(model.switch_mlp(x, chosen), np.array(wide(x, chosen)), 1e-5)


def test_a_mixture_that_is_wrong_is_not_used(products: NarrowProducts, caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(NarrowProducts):
        def mixture(self, *arguments: Any, **further: Any) -> mx.array:
            return 1.1 * super().mixture(*arguments, **further)

    model = nn.Module()
    model.switch_mlp = SwitchGLU(64, 32, 4)
    model.set_dtype(mx.bfloat16)
    caplog.set_level("INFO")
    substitute_narrow_experts(model, Wrong(products._module))
    assert "the mixture as one operation differs" in caplog.text
    assert type(model.switch_mlp) is SwitchGLU
    assert type(model.switch_mlp.up_proj) is NarrowSwitchLinear


# -- models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "mode"), [(4, "mxfp4"), (6, "affine"), (5, "affine")])
def test_eight_bits_have_every_value_of_fewer(bits: int, mode: str) -> None:
    values = mx.random.normal((3, 8, 64), key=mx.random.key(1)) * mx.array([1e-6, 1.0, 1e6])[:, None, None]
    words, scales, *biases = mx.quantize(values, 32, bits, mode)
    given = {"m.weight": words, "m.scales": scales, **({"m.biases": biases[0]} if biases else {})}
    repacked, packings = with_eight_bits(given, {"m": Packing(bits, 32, mode), "n": Packing(4, 32)}, ["m"])
    assert packings == {"m": Packing(8, 32), "n": Packing(4, 32)}
    wide = [repacked[f"m.{part}"].astype(mx.float32) for part in ("scales", "biases")]
    got = mx.dequantize(repacked["m.weight"], *wide, 32, 8)
    expected = mx.dequantize(words, scales, biases[0] if biases else None, 32, bits, mode, dtype=mx.float32)
    assert mx.allclose(got, expected, rtol=1e-6, atol=0).item()


def folder_of(path: Path, name: str, bits: int, mode: str = "affine") -> Path:
    """A checkpoint of a tiny model with 16 bits, or packed with fewer."""
    model = tiny_model(name)
    model.set_dtype(mx.bfloat16)
    if bits < 16:
        nn.quantize(model, 32, bits, mode=mode)
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = {"model_type": name, **CONFIGS[name]}
    if bits < 16:
        config["quantization"] = {"bits": bits, "group_size": 32, "mode": mode}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    return path


def both(folder: Path, products: NarrowProducts) -> tuple[LoadedModel, LoadedModel]:
    """Narrow and float32."""
    narrow = load_model(describe(folder), device="cpu", narrow=ALL, products=products)
    return narrow, load_model(describe(folder), device="cpu")


def count_of(model: nn.Module, kind: type) -> int:
    return sum(type(module) is kind for _, module in model.named_modules())


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_give_the_same_logits(tmp_path: Path, products: NarrowProducts, name: str, bits: int) -> None:
    narrow, wide = both(folder_of(tmp_path / "m", name, bits), products)
    mixtures = sum(isinstance(module, SwitchGLU) for _, module in wide.model.named_modules())
    assert count_of(narrow.model, NarrowSwitchGLU) == count_of(narrow.model, WeightedExperts) == mixtures > 0
    assert count_of(narrow.model, SwitchLinear) == count_of(narrow.model, QuantizedSwitchLinear) == 0
    assert narrow.weights_bytes < {4: 0.35, 8: 0.5, 16: 0.7}[bits] * wide.weights_bytes
    tokens = mx.array([[5, 9, 2, 88, 17, 3, 101, 64], [1, 2, 3, 4, 5, 6, 7, 8]])
    got, expected = narrow.model(tokens), wide.model(tokens)
    assert got.dtype == mx.float32
    spread = mx.max(expected) - mx.min(expected)
    assert (mx.max(mx.abs(got - expected)) / spread).item() < 2e-3


@pytest.mark.parametrize(("bits", "mode"), [(4, "mxfp4"), (6, "affine"), (5, "affine")])
def test_other_packings_are_held_with_eight_bits(
    tmp_path: Path, products: NarrowProducts, bits: int, mode: str
) -> None:
    """As the checkpoints of gpt-oss are packed, and many of 6 bits; no value changes."""
    narrow, wide = both(folder_of(tmp_path / "m", "gpt_oss", bits, mode), products)
    assert count_of(narrow.model, WeightedExperts) == 2
    assert "held as 8 bits, computed" in narrow.notes[-1]
    assert narrow.weights_bytes < 0.5 * wide.weights_bytes
    tokens = mx.array([[5, 9, 2, 88, 17, 3, 101, 64]])
    got, expected = narrow.model(tokens), wide.model(tokens)
    spread = mx.max(expected) - mx.min(expected)
    assert (mx.max(mx.abs(got - expected)) / spread).item() < 1e-3


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_blocks_row_is_the_same_in_any_company(
    tmp_path: Path, products: NarrowProducts, name: str, bits: int
) -> None:
    narrow = load_model(
        describe(folder_of(tmp_path / "m", name, bits)), device="cpu", narrow=ALL, products=products
    )
    block = next(module for _, module in narrow.model.named_modules() if type(module) is WeightedExperts)
    x = mx.random.normal((40, 1, 64), key=mx.random.key(4))
    together = block(x)
    for row in (0, 13, 39):
        assert mx.array_equal(block(x[row : row + 1]), together[row : row + 1]).item()
    assert mx.array_equal(block(x.reshape(1, 40, 64)).reshape(40, 1, 64), together).item()


def test_experts_are_widened_where_they_may_not_stay(tmp_path: Path, products: NarrowProducts) -> None:
    folder = folder_of(tmp_path / "m", "mixtral", 4)
    loaded = load_model(describe(folder), device="cpu", narrow=("packed", "plain"), products=products)
    assert count_of(loaded.model, SwitchGLU) == 2
    assert "experts in float32" in loaded.notes[-1]
    assert loaded.weights_bytes > 2 * both(folder, products)[0].weights_bytes


@pytest.mark.parametrize("bits", [4, 16])
def test_the_plan_counts_what_is_held(
    tmp_path: Path, products: NarrowProducts, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    folder = folder_of(tmp_path / "m", "qwen3_moe", bits)
    device, config = DeviceMemory("cpu", 1 << 34, 1 << 34, 1 << 34), EngineConfig(model=str(folder))
    monkeypatch.setattr(cpu_products, "choose", lambda: NarrowChoice(products, True, True, "", experts=True))
    found = estimate(describe(folder), config, device)
    narrow, _ = both(folder, products)
    assert found.fixed.weights <= narrow.weights_bytes <= 1.1 * found.fixed.weights  # last strips are filled up
    assert found.form == f"{bits} bits, computed in float32"
    monkeypatch.setattr(cpu_products, "choose", lambda: NarrowChoice(products, True, True, ""))
    without = estimate(describe(folder), config, device)
    assert without.fixed.weights > 1.4 * found.fixed.weights
    assert without.form == f"{bits} bits, experts in float32, computed in float32"


@pytest.mark.parametrize(("bits", "form"), [(4, "4 bits"), (16, "float32, experts in 16 bits")])
def test_experts_stay_where_linear_layers_do_not(
    tmp_path: Path, products: NarrowProducts, bits: int, form: str
) -> None:
    """Their products replace slower ones."""
    folder = folder_of(tmp_path / "m", "mixtral", bits)
    loaded = load_model(describe(folder), device="cpu", narrow=("experts",), products=products)
    assert count_of(loaded.model, NarrowSwitchGLU) == 2
    assert type(loaded.model.lm_head) is nn.Linear
    assert f"held as {form}, computed" in loaded.notes[-1]


def test_models_without_experts_are_held_as_before(tmp_path: Path, products: NarrowProducts) -> None:
    loaded = load_model(
        describe(folder_of(tmp_path / "m", "llama", 16)), device="cpu", narrow=("experts",), products=products
    )
    assert "held as float32 (" in loaded.notes[-1]


def test_a_block_that_computes_something_else_stays(products: NarrowProducts) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top_k = 2
            self.gate = nn.Linear(64, 4, bias=False)
            self.switch_mlp = SwitchGLU(64, 32, 4)

        def __call__(self, x: mx.array) -> mx.array:
            scores = mx.sigmoid(self.gate(x))
            chosen = mx.argpartition(scores, kth=-2, axis=-1)[..., -2:]
            return (self.switch_mlp(x, chosen) * mx.take_along_axis(scores, chosen, axis=-1)[..., None]).sum(-2)

    model = nn.Module()
    model.mlp = Block()
    model.mlp.switch_mlp.set_dtype(mx.bfloat16)
    substitute_narrow_experts(model, products)
    assert type(model.mlp.switch_mlp) is NarrowSwitchGLU
    assert substitute_weighted_experts(model) == 0


def test_models_that_look_at_experts_weights_are_told_apart() -> None:
    for name in ARCHITECTURES:
        assert calls_only(tiny_model(name), KINDS)

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = SwitchLinear(8, 8, 2)

        def __call__(self, tokens: mx.array) -> mx.array:
            return self.experts.weight[tokens]

    assert not calls_only(Looks(), KINDS)


OTHER = """
import sys
import mlx.core
from headrace.runner.cpu import experts as cpu_experts, products as cpu_products
from headrace.runner.kernels import native_extension
from headrace.runner.cpu.narrow_weights import NarrowProducts
module = native_extension.load(cpu_products.extension((f"-march={sys.argv[1]}",)))
assert not cpu_experts.check(NarrowProducts(module))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="forms for x86-64")
@pytest.mark.parametrize("processor", ["x86-64", "haswell"])
def test_forms_for_other_processors(products: NarrowProducts, processor: str) -> None:
    """In a process of their own: a module of one name can be loaded once."""
    if processor == "haswell" and "avx2" not in cpu_features().split():
        pytest.skip("this processor has no AVX2")
    done = subprocess.run([sys.executable, "-c", OTHER, processor], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# -- the choice --------------------------------------------------------------------------------------------


def test_what_is_wrong_is_found(products: NarrowProducts) -> None:
    assert cpu_experts.check(products) == ""

    class Wrong(NarrowProducts):
        def mixture(self, *arguments: Any, **further: Any) -> mx.array:
            return 1.01 * super().mixture(*arguments, **further)

    class Company(NarrowProducts):
        def mixture(self, x: mx.array, *arguments: Any, **further: Any) -> mx.array:
            return super().mixture(x, *arguments, **further) * (1 + 1e-6 * (len(x) - 1))

    assert "wrong" in cpu_experts.check(Wrong(products._module))
    assert "a row depends on the others" in cpu_experts.check(Company(products._module))


@pytest.mark.parametrize("rates", [(3.0, 5.0, 4.0), (0.5, 0.9, 1.0)])
def test_experts_stay_narrow_where_that_pays(
    products: NarrowProducts, monkeypatch: pytest.MonkeyPatch, rates: tuple[float, ...]
) -> None:
    monkeypatch.setattr(cpu_products, "measure", lambda _: Measured("", (2.0,), (2.0,), rates))
    choice = cpu_products.choose(lambda: products._module)
    assert choice.kinds == (ALL if rates[0] > 1 else ("packed", "plain"))
    assert ("(widened)" in choice.note) == (rates[0] < 1)
    monkeypatch.setattr(cpu_experts, "check", lambda _: "experts of 4 bits: wrong")
    choice = cpu_products.choose(lambda: products._module)
    assert choice.kinds == ("packed", "plain")
    assert "cpu_experts.h computes wrongly here" in choice.note
