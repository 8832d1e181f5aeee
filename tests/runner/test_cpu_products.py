"""Products over narrow weights: right, the same for a row in any company, chosen only where they pay."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import tiny_model

from headrace.core.machine import cpu_features
from headrace.errors import StartupError
from headrace.runner.cpu import products as cpu_products
from headrace.runner.cpu.narrow_weights import (
    NarrowMatrix,
    NarrowProducts,
    stacked,
)
from headrace.runner.kernels import native_extension
from headrace.runner.substitutions.fused_linear import fuse_projections
from headrace.runner.substitutions.modules import calls_only
from headrace.runner.substitutions.narrow_linear import (
    KINDS,
    NarrowEmbedding,
    NarrowGatedMLP,
    NarrowLinear,
    substitute_narrow,
)

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="products of the CPU")

FORMS = [(16, 1, "float16"), (16, 1, "bfloat16")] + [
    (bits, group, scale)
    for bits in (4, 8)
    for group in (32, 64, 128)
    for scale in ("float16", "bfloat16", "float32")
]
SHAPES = [(1, 128), (16, 128), (17, 256), (70, 384), (133, 128)]  # outputs, inputs
ROWS = (1, 2, 3, 5, 7, 12, 13, 24, 25, 40, 100, 481)
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


@cache
def native() -> NarrowProducts:
    return NarrowProducts(cpu_products._load())


@pytest.fixture(scope="module")
def products() -> NarrowProducts:
    try:
        return native()
    except native_extension.ExtensionError as error:
        pytest.skip(f"the extension cannot be built here: {error}")


def matrix_of(bits: int, group: int, scale: str, outputs: int, inputs: int) -> tuple[NarrowMatrix, np.ndarray]:
    """A random matrix and its weights in float64."""
    values = mx.array(np.random.default_rng(outputs).standard_normal((outputs, inputs)).astype(np.float32))
    if bits == 16:
        plain = values.astype(DTYPES[scale])
        return native().plain(plain), np.array(plain.astype(mx.float32), dtype=np.float64)
    words, scales, biases = mx.quantize(values, group_size=group, bits=bits)
    scales, biases = scales.astype(DTYPES[scale]), biases.astype(DTYPES[scale])
    weights = mx.dequantize(
        words, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits
    )
    return native().packed(words, scales, biases, bits), np.array(weights, dtype=np.float64)


def rows_of(count: int, inputs: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, inputs)).astype(np.float32)


@pytest.mark.parametrize(("bits", "group", "scale"), FORMS)
def test_products_are_those_of_float64(products: NarrowProducts, bits: int, group: int, scale: str) -> None:
    for outputs, inputs in SHAPES:
        matrix, weights = matrix_of(bits, group, scale, outputs, inputs)
        bias = np.random.default_rng(3).standard_normal(outputs).astype(np.float32)
        for rows in ROWS:
            x = rows_of(rows, inputs)
            expected = x.astype(np.float64) @ weights.T
            got = np.array(products.product(mx.array(x), matrix))
            # 16-bit weights: float32 sums. Packed: x is rounded to 2^-16 of the largest value of its group.
            scale_of_sum = np.abs(x).max() * np.abs(weights).max() * math.sqrt(inputs)
            assert np.abs(got - expected).max() < (2e-6 if bits == 16 else 4e-5) * scale_of_sum
            with_bias = np.array(products.product(mx.array(x), matrix, mx.array(bias)))
            assert np.array_equal(with_bias, got + bias)


@pytest.mark.parametrize(("bits", "group", "scale"), FORMS)
def test_a_row_is_the_same_in_any_company(products: NarrowProducts, bits: int, group: int, scale: str) -> None:
    matrix, _ = matrix_of(bits, group, scale, 150, 384)
    x = mx.array(rows_of(600, 384))
    alone = mx.concatenate([products.product(x[i : i + 1], matrix) for i in range(30)])
    for rows in (*ROWS, 600):
        together = products.product(x[:rows], matrix)
        assert mx.array_equal(together[:30], alone[:rows]).item()


def test_rows_of_any_shape_and_layout(products: NarrowProducts) -> None:
    matrix, _ = matrix_of(4, 32, "float16", 48, 128)
    x = rows_of(24, 128)
    flat = products.product(mx.array(x), matrix)
    assert mx.array_equal(products.product(mx.array(x).reshape(2, 3, 4, 128), matrix).reshape(24, 48), flat).item()
    turned = mx.array(np.ascontiguousarray(x.T)).T
    assert mx.array_equal(products.product(turned, matrix), flat).item()
    assert products.product(mx.zeros((0, 128)), matrix).shape == (0, 48)


def test_inputs_that_are_no_multiple_of_anything(products: NarrowProducts) -> None:
    matrix, weights = matrix_of(16, 1, "bfloat16", 19, 77)
    x = rows_of(9, 77)
    assert np.allclose(np.array(products.product(mx.array(x), matrix)), x @ weights.T, atol=1e-4)


def test_values_that_are_not_finite_stay_visible(products: NarrowProducts) -> None:
    for bits, group in ((4, 32), (16, 1)):
        matrix, _ = matrix_of(bits, group, "float16", 32, 128)
        x = rows_of(3, 128)
        x[1, 7] = np.nan
        x[2, 9] = np.inf
        got = np.array(products.product(mx.array(x), matrix))
        assert np.isfinite(got[0]).all()
        assert np.isnan(got[1]).all()
        assert not np.isfinite(got[2]).any()


def test_tiny_and_zero_rows(products: NarrowProducts) -> None:
    matrix, weights = matrix_of(8, 64, "float16", 32, 128)
    x = rows_of(3, 128) * np.float32(1e-20)
    x[1] = 0
    got = np.array(products.product(mx.array(x), matrix), dtype=np.float64)
    assert not got[1].any()
    assert np.allclose(got[[0, 2]], x[[0, 2]].astype(np.float64) @ weights.T, rtol=1e-3, atol=1e-23)


@pytest.mark.parametrize(("bits", "group", "scale"), FORMS)
def test_single_outputs(products: NarrowProducts, bits: int, group: int, scale: str) -> None:
    matrix, weights = matrix_of(bits, group, scale, 133, 256)
    index = np.array([[0, 132, 15], [16, 17, 99]])
    got = np.array(products.rows(mx.array(index), matrix))
    assert got.shape == (2, 3, 256)
    assert np.allclose(got, weights[index], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("bits", "group", "scale"), [(16, 1, "bfloat16"), (4, 32, "float16"), (8, 64, "bfloat16")]
)
def test_gated_products(products: NarrowProducts, bits: int, group: int, scale: str) -> None:
    for outputs in (96, 41):
        gate, _ = matrix_of(bits, group, scale, outputs, 128)
        other = replace(gate, strips=mx.contiguous(gate.strips[::-1]))
        pair = products.interleaved(gate, other)
        assert pair is not None
        for rows in ROWS:
            x = mx.array(8 * rows_of(rows, 128))
            expected = nn.silu(products.product(x, gate)) * products.product(x, other)
            assert mx.allclose(products.gated(x, pair), expected, rtol=1e-5, atol=1e-5).item()


def test_matrices_stack_where_they_fit(products: NarrowProducts) -> None:
    first, _ = matrix_of(4, 32, "float16", 48, 128)
    last, _ = matrix_of(4, 32, "float16", 21, 128)
    both = stacked([first, last])
    assert both is not None
    x = mx.array(rows_of(5, 128))
    expected = mx.concatenate([products.product(x, first), products.product(x, last)], axis=-1)
    assert mx.array_equal(products.product(x, both), expected).item()
    assert stacked([last, first]) is None
    assert stacked([first, matrix_of(8, 32, "float16", 48, 128)[0]]) is None


def test_results_in_parts(products: NarrowProducts) -> None:
    for bits, group in ((4, 32), (16, 1)):
        matrix, _ = matrix_of(bits, group, "float16", 101, 128)
        bias = mx.array(rows_of(1, 101)[0])
        for rows in ROWS:
            x = mx.array(rows_of(rows, 128)).reshape(1, rows, 128)
            whole = products.product(x, matrix, bias)
            parts = products.parts(x, matrix, bias, (48, 16, 37))
            assert [part.shape for part in parts] == [(1, rows, 48), (1, rows, 16), (1, rows, 37)]
            assert mx.array_equal(mx.concatenate(parts, axis=-1), whole).item()
    for widths in ((40, 61), (48, 52), (16, 16, 16, 16, 37)):
        with pytest.raises(ValueError, match="part"):
            products.parts(mx.zeros((1, 128)), matrix, None, widths)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text"])
def test_fused_projections_give_the_same(products: NarrowProducts, name: str) -> None:
    fused, _ = narrowed(name, products, 4)
    apart, _ = narrowed(name, products, 4)
    assert fuse_projections(fused) == 0
    assert fuse_projections(fused, (NarrowLinear,)) >= len(fused.model.layers)
    tokens = mx.array([[5, 9, 2, 88, 17, 3, 101, 64]])
    assert mx.array_equal(fused(tokens), apart(tokens)).item()


def test_weights_must_lie_in_one_piece(products: NarrowProducts) -> None:
    matrix, _ = matrix_of(4, 32, "float16", 48, 128)
    mx.eval(matrix.strips)
    with pytest.raises(ValueError, match="in one piece"):
        mx.eval(products.product(mx.zeros((1, 128)), replace(matrix, strips=matrix.strips[::-1])))


def test_wrong_sizes_are_refused(products: NarrowProducts) -> None:
    matrix, _ = matrix_of(4, 32, "float16", 48, 128)
    with pytest.raises(ValueError, match="size"):
        products.product(mx.zeros((1, 256)), matrix)
    with pytest.raises(ValueError, match="no such form"):
        products.product(mx.zeros((1, 100)), matrix)
    with pytest.raises(ValueError, match="bias"):
        products.product(mx.zeros((1, 128)), matrix, mx.zeros(3))


def test_products_work_in_compiled_functions(products: NarrowProducts) -> None:
    matrix, _ = matrix_of(4, 32, "float16", 48, 128)
    x = mx.array(rows_of(3, 128))
    compiled = mx.compile(lambda x: products.product(x * 2, matrix) + 1)
    assert mx.allclose(compiled(x), products.product(x * 2, matrix) + 1, rtol=1e-6).item()


# -- the choice ----------------------------------------------------------------------------------------


def test_without_a_compiler_nothing_stays_narrow() -> None:
    def load() -> Any:
        raise native_extension.ExtensionError("g++ is missing")

    choice = cpu_products.choose(load)
    assert (choice.products, choice.kinds) == (None, ())
    assert "g++ is missing" in choice.note


def test_wrong_products_are_found(products: NarrowProducts) -> None:
    module = products._module

    def wrong(x: mx.array, *args: Any, **form: Any) -> list[mx.array]:
        [result] = module.product(x, *args, **form)
        return [result * 1.01 if form["bits"] == 8 else result]

    def in_company(x: mx.array, *args: Any, **form: Any) -> list[mx.array]:
        return [module.product(x, *args, **form)[0] * (1 + 1e-6 * (len(x) == 1))]

    for product, reason in ((wrong, "8 bits"), (in_company, "depends on the others")):
        fake = SimpleNamespace(product=product, rows=module.rows, threads=module.threads, strips=module.strips)
        choice = cpu_products.choose(lambda fake=fake: fake)
        assert choice.products is None
        assert reason in choice.note
    assert not cpu_products.check(products)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="forms for x86-64")
@pytest.mark.parametrize("processor", ["x86-64", "haswell"])
def test_forms_for_other_processors(products: NarrowProducts, processor: str) -> None:
    """In a process of its own: one that has loaded an extension keeps it."""
    if processor == "haswell" and "avx2" not in cpu_features().split():
        pytest.skip("this processor has no AVX2")
    program = (
        "import sys, mlx.core; from headrace.runner.kernels import native_extension;"
        "from headrace.runner.cpu import experts as cpu_experts, products as cpu_products;"
        "from headrace.runner.cpu.narrow_weights import NarrowProducts;"
        "module = native_extension.load(cpu_products.extension((sys.argv[1],)));"
        "products = NarrowProducts(module);"
        "print(module.lanes(), cpu_products.check(products), cpu_experts.check(products))"
    )
    command = [sys.executable, "-c", program, f"-march={processor}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split() == [{"x86-64": "4", "haswell": "8"}[processor]]


def test_what_was_measured_decides_on_any_processor(
    products: NarrowProducts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "cpu_features", lambda: "avx2 fma f16c")
    monkeypatch.setattr(cpu_products, "_load", lambda: products._module)
    rates = {"packed": (4.0, 1.1, 1.1), "plain": (2.0, 0.7, 0.7), "experts": (0.5, 0.5, 0.5)}
    monkeypatch.setattr(cpu_products, "measure", lambda products, key: cpu_products.Measured(key, **rates))
    choice = cpu_products.choose()
    assert choice.kinds == ("packed",)
    assert "4 bits 4.0, 1.1, 1.1; 16 bits 2.0, 0.7, 0.7 (widened)" in choice.note


def test_narrow_weights_must_pay() -> None:
    assert cpu_products.pays((2.0, 1.1, 0.9))
    assert not cpu_products.pays((0.9, 0.9, 0.9))
    assert not cpu_products.pays((5.0, 1.0, 0.3))


# -- models --------------------------------------------------------------------------------------------


def narrowed(name: str, products: NarrowProducts, bits: int) -> tuple[nn.Module, nn.Module]:
    """A model with narrow layers, and one with the same weights in float32."""
    wide, narrow = tiny_model(name), tiny_model(name)
    if bits == 16:
        for model in (wide, narrow):
            model.set_dtype(mx.bfloat16)
        wide.set_dtype(mx.float32)
    else:
        nn.quantize(narrow, group_size=32, bits=bits)
        nn.quantize(wide, group_size=32, bits=bits)
    assert substitute_narrow(narrow, products) > 0
    norms = {key: value for key, value in nn.utils.tree_flatten(narrow.parameters()) if value.dtype == mx.bfloat16}
    narrow.load_weights([(key, value.astype(mx.float32)) for key, value in norms.items()], strict=False)
    return narrow, wide


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "qwen3", "gemma3_text"])
def test_models_give_the_same_logits(products: NarrowProducts, name: str, bits: int) -> None:
    narrow, wide = narrowed(name, products, bits)
    tokens = mx.array([[5, 9, 2, 88, 17, 3, 101, 64]])
    got, expected = narrow(tokens), wide(tokens)
    assert got.dtype == mx.float32
    spread = mx.max(expected) - mx.min(expected)
    assert (mx.max(mx.abs(got - expected)) / spread).item() < 2e-3


def test_layers_become_narrow(products: NarrowProducts) -> None:
    narrow, _ = narrowed("llama_tied", products, 4)
    layer = narrow.model.layers[0]
    assert isinstance(narrow.model.embed_tokens, NarrowEmbedding)
    assert isinstance(layer.self_attn.q_proj, NarrowLinear)
    assert isinstance(layer.mlp, NarrowGatedMLP)


def test_other_activations_keep_their_layer(products: NarrowProducts) -> None:
    narrow, _ = narrowed("gemma3_text", products, 4)
    assert not isinstance(narrow.model.layers[0].mlp, NarrowGatedMLP)
    assert isinstance(narrow.model.layers[0].mlp.gate_proj, NarrowLinear)


def test_a_wrong_product_over_a_models_weights_ends_the_start(products: NarrowProducts) -> None:
    class Wrong(NarrowProducts):
        def product(self, x: mx.array, matrix: NarrowMatrix, bias: mx.array | None = None) -> mx.array:
            return 1.1 * super().product(x, matrix, bias)

    model = tiny_model("llama")
    nn.quantize(model, group_size=32, bits=4)
    with pytest.raises(StartupError, match="--dequantize"):
        substitute_narrow(model, Wrong(products._module))


def test_models_that_look_at_weights_are_told_apart() -> None:
    assert calls_only(tiny_model("llama"), KINDS)
    assert calls_only(tiny_model("llama_tied"), KINDS)

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(10, 8)

        def __call__(self, tokens: mx.array) -> mx.array:
            return self.embed_tokens(tokens) @ self.embed_tokens.weight.T

    assert not calls_only(Looks(), KINDS)
