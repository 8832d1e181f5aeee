"""Gemma 2's attention through token-major pools gives mlx-lm's own tokens and logits."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import Case, build, definition, fault
from paged_driver import Driver, make_runner, reference_tokens
from tiny_models import VOCAB, tiny_model

from headrace.params import SamplingParams
from headrace.runner.attention import gather, slices
from headrace.runner.attention.dispatch import install
from headrace.runner.attention.reference import paged_attention
from headrace.runner.kv.layout import read_layout
from headrace.runner.mlx_lm_adapter import one_sequence_cache
from headrace.runner.model_runner import RunnerOptions
from headrace.runner.start.context_cost import computes_own_attention
from headrace.runner.substitutions.fused_linear import fuse_projections
from headrace.runner.substitutions.softcapped_attention import SoftcappedAttention, substitute_softcapped_attention

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def substituted() -> tuple[object, float]:
    install()
    model = tiny_model("gemma2")
    for layer in model.layers:  # weights so wide that the cap is felt
        layer.self_attn.attn_logit_softcapping = 3.0
        layer.self_attn.scale *= 4
    return model, substitute_softcapped_attention(model)


@pytest.mark.parametrize(("head_major", "compile"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("chunk", [3, 64])
def test_tokens_are_those_of_the_unmodified_model(head_major: bool, compile: bool, chunk: int) -> None:
    model, softcap = substituted()
    assert softcap == 3.0
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(count)] for count in (1, 5, 34, 13)]
    expected = [
        reference_tokens(model, prompt, 12) for prompt in prompts
    ]  # over mlx-lm's cache: the replaced modules
    options = RunnerOptions(compile=compile)
    runner, layout = make_runner(model, vocab_size=VOCAB, head_major=head_major, options=options)
    driver = Driver(runner, layout, 400)
    for prompt in prompts:
        driver.add(prompt, GREEDY)
    assert driver.run(chunk) == expected


def test_other_caches_see_the_replaced_module() -> None:
    model, _ = substituted()
    plain = tiny_model("gemma2")
    for layer in plain.layers:
        layer.self_attn.attn_logit_softcapping = 3.0
        layer.self_attn.scale *= 4
    tokens = mx.array([[3, 1, 4, 1, 5]])
    assert all(isinstance(layer.self_attn, SoftcappedAttention) for layer in model.layers)
    got = model(tokens, cache=one_sequence_cache(model))
    assert np.array_equal(np.array(got), np.array(plain(tokens, cache=one_sequence_cache(plain))))


@pytest.mark.parametrize("dtype", ["int8", "auto"])
@pytest.mark.parametrize("context", [3, 700])  # gathered together, and sliced in several pieces
def test_slices_cap_what_the_gather_caps(monkeypatch: pytest.MonkeyPatch, dtype: str, context: int) -> None:
    monkeypatch.setattr(slices, "READ_BYTES", 1)
    logits = []
    for head_major in (True, False):
        model, _ = substituted()
        runner, layout = make_runner(model, vocab_size=VOCAB, head_major=head_major, kv_cache_dtype=dtype)
        driver = Driver(runner, layout, 400)
        row = driver.add([index * 7 % VOCAB for index in range(context)], GREEDY)
        mx.eval(runner.prefill_logits([driver.row(row, context - 1)]))
        row.computed += context - 1
        logits.append(np.array(runner.decode_logits([driver.row(row, 1)])))
    assert np.abs(logits[0] - logits[1]).max() < 2e-3 * np.abs(logits[1]).max()


def test_a_plan_without_weights_replaces_it_too() -> None:
    model = tiny_model("gemma2")
    assert substitute_softcapped_attention(model, check=False) == 50.0
    assert not computes_own_attention(model, read_layout(model, 16))


def test_fused_projections_are_kept() -> None:
    install()
    model = tiny_model("gemma2")
    fuse_projections(model)
    assert substitute_softcapped_attention(model) == 50.0


def test_other_models_and_wrong_replacements_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    assert substitute_softcapped_attention(tiny_model("gemma3_text")) == 0.0
    model = tiny_model("gemma2")
    monkeypatch.setattr(SoftcappedAttention, "softcap", property(lambda self: 0.01))
    assert substitute_softcapped_attention(model) == 0.0
    assert not any(isinstance(module, SoftcappedAttention) for _, module in model.named_modules())


@pytest.mark.parametrize("tile", [32, 4096])
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_reference_caps_by_definition(
    monkeypatch: pytest.MonkeyPatch, tile: int, bits: int | None, sinks: bool
) -> None:
    monkeypatch.setattr(gather, "KEY_TILE", tile)
    case = Case("float32", (64, 64), 4, bits=bits, window=40, sinks=sinks, softcap=1.5, lengths=(1, 33, 90, 17))
    queries, view, logits = build(case)
    got = paged_attention(queries, view, case.scale, case.window, logits, case.softcap)
    assert fault(case, np.array(got)[:, :, 0], definition(case, queries, view, logits)) is None


def test_a_kernel_is_handed_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = substituted()
    asked = []

    class Kernel:
        @staticmethod
        def supports(queries: mx.array, view: object) -> bool:
            return queries.shape[2] == 1

        def __call__(self, *args: object) -> mx.array:
            asked.append(args[-1])
            return paged_attention(*args)  # type: ignore[arg-type]

    runner, layout = make_runner(model, vocab_size=VOCAB, head_major=False)
    install(Kernel())  # type: ignore[arg-type]
    driver = Driver(runner, layout, 400)
    driver.add([1, 2, 3, 4], GREEDY)
    driver.run(64)
    assert asked and set(asked) == {3.0}
