"""The sampling kernels, compiled as C++ and run on the CPU, against the definition in float64."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulated_cuda import emulated
from paged_driver import Driver, make_runner
from sampling_cases import as_read
from tiny_models import VOCAB, tiny_model

from headrace.params import SamplingParams
from headrace.runner.kernels.language import CUDA_NAMES
from headrace.runner.sampling.batch import LogitEdits, SamplingBatch
from headrace.runner.sampling.check import choose_sampling
from headrace.runner.sampling.definition import Asked, fault, random_rows
from headrace.runner.sampling.kernel import SamplingKernel
from headrace.runner.sampling.sampler import sample
from headrace.runner.sampling.source import CUDA_SAMPLING_NAMES

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
NAMES = CUDA_NAMES + CUDA_SAMPLING_NAMES
GREEDY = Asked(temperature=0.0)
SMALL = 700  # three strips


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sampling")


@pytest.fixture(scope="module")
def kernel(folder: Path) -> SamplingKernel:
    return SamplingKernel(emulated(folder), NAMES, threads=32, strips=1)


def normal(rows: int, vocab: int, *, spread: float = 3.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * spread


def drawn(
    kernel: SamplingKernel, logits: np.ndarray, asked: list[Asked], dtype: mx.Dtype = mx.float32
) -> tuple[list[int], list[bool]]:
    given, read = as_read(logits, dtype)
    tokens, finite = kernel(given, random_rows(asked, logits.shape[1]))
    for row, (one, token, good) in enumerate(
        zip(asked, np.array(tokens).tolist(), np.array(finite).tolist(), strict=True)
    ):
        whole = not np.isnan(read[row]).any() and np.isfinite(read[row].max())
        assert good == whole, f"row {row}"
        if whole:
            assert fault(read[row], one, token) is None, f"row {row}: {one}"
    return np.array(tokens).tolist(), np.array(finite).tolist()


WIDE = [
    GREEDY,
    Asked(temperature=0.7),
    Asked(top_p=0.9),
    Asked(temperature=0.6, top_p=0.9, min_p=0.01),
    Asked(top_k=20, top_p=0.95),
    Asked(temperature=1.5, min_p=0.1),
]


@pytest.mark.parametrize("vocab", [49152, 128256, 151936, 32003, 1, 5, 255, 256, 257, 8193])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=["f32", "bf16", "f16"])
def test_vocabularies_and_types(kernel: SamplingKernel, vocab: int, dtype: mx.Dtype) -> None:
    if vocab > 10000 and dtype == mx.float16:
        pytest.skip("the size shows with other types")
    drawn(kernel, normal(len(WIDE), vocab, seed=vocab), WIDE, dtype)


@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0])
def test_a_grid_of_parameters(kernel: SamplingKernel, spread: float) -> None:
    """Flat rows (all equal with 0) and steep ones; top_k below, at and beyond the number of strips."""
    asked = [
        Asked(temperature, top_k, top_p, min_p, add=7919 * index, multiply=2 * index + 1)
        for index, (temperature, top_k, top_p, min_p) in enumerate(
            product(
                (0.3, 1.0, 5.0), (0, 1, 2, 3, 4, 50, 699, 700), (1e-9, 0.2, 0.9, 0.9999, 1.0), (0.0, 0.03, 1.0)
            )
        )
    ]
    drawn(kernel, normal(len(asked), SMALL, spread=spread, seed=3), asked)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
def test_ties(kernel: SamplingKernel, dtype: mx.Dtype) -> None:
    """Few distinct values: borders are among equals, all of which are kept, though only some count."""
    logits = np.random.default_rng(5).integers(0, 4, (36, SMALL)).astype(np.float32)
    logits[:, 100:103] = 9.0
    logits[1::2] -= 2.0  # zeros of both signs
    logits[1::2][logits[1::2] == 0] *= -1
    asked = [
        Asked(top_k=top_k, top_p=top_p, min_p=min_p, add=index * 31, multiply=3)
        for index, (top_k, top_p, min_p) in enumerate(product((0, 1, 4, 300), (0.3, 0.99, 1.0), (0.0, 0.001, 0.1)))
    ]
    drawn(kernel, logits, asked, dtype)
    tokens, _ = drawn(kernel, logits[:4], [GREEDY] * 4, dtype)
    assert tokens == [100] * 4


def test_many_equal_at_the_kth_place(kernel: SamplingKernel) -> None:
    """More equal logits than can be collected: the border is found over the whole row."""
    logits = np.zeros((6, 5000), np.float32)
    logits[:, 4999] = 1.0
    logits[3:] += normal(1, 5000, spread=1e-3)
    asked = [Asked(top_k=top_k, top_p=top_p) for top_k, top_p in ((1, 1.0), (5, 1.0), (19, 0.5))] * 2
    tokens, _ = drawn(kernel, logits, asked)
    assert tokens[0] == 4999


def test_banned_and_broken_rows(kernel: SamplingKernel) -> None:
    logits = normal(8, SMALL)
    logits[0, 5:] = -np.inf
    logits[1, :] = -np.inf
    logits[1, [3, 600]] = 0.5
    logits[2, 300] = np.nan
    logits[3, 300] = np.inf
    logits[4] = -np.inf
    logits[5] = np.nan
    logits[6, 1:] = -np.inf
    logits[7, 0] = -np.inf
    for one in [*WIDE, Asked(top_k=4), Asked(top_k=50, top_p=0.5), Asked(top_k=600), Asked(temperature=1e-4)]:
        _, finite = drawn(kernel, logits, [one] * 8)
        assert finite == [True, True, False, False, False, False, True, True]


def test_a_quotient_that_overflows_is_greedy(kernel: SamplingKernel) -> None:
    logits = np.zeros((3, SMALL), np.float32)
    logits[:, 77], logits[:, 78] = 2e38, 3e38
    asked = [Asked(temperature=1e-4, top_k=3), Asked(temperature=1e-4, top_p=0.5), Asked(temperature=1e-4)]
    tokens, finite = kernel(mx.array(logits), random_rows(asked, SMALL))
    assert np.array(tokens).tolist() == [78] * 3 and all(np.array(finite))


def test_a_row_is_the_same_in_any_company_and_place(kernel: SamplingKernel) -> None:
    asked = [*WIDE, Asked(top_k=3, add=5), Asked(top_p=0.5, add=6)]
    logits = normal(len(asked), 3000, spread=1.0, seed=8)
    together, _ = drawn(kernel, logits, asked)
    backwards, _ = drawn(kernel, logits[::-1], asked[::-1])
    assert backwards[::-1] == together
    for row, one in enumerate(asked):
        assert drawn(kernel, logits[row : row + 1], [one])[0] == [together[row]]


def test_the_block_s_size_does_not_show(kernel: SamplingKernel, folder: Path) -> None:
    whole = SamplingKernel(emulated(folder), NAMES, threads=1024)
    asked = [*WIDE, Asked(top_k=600, top_p=0.7)]
    logits = normal(len(asked), 6000, spread=1.0, seed=9)
    assert drawn(whole, logits, asked) == drawn(kernel, logits, asked)


@pytest.mark.parametrize(
    "one", [Asked(), Asked(top_p=0.8), Asked(top_k=3), Asked(min_p=0.2), Asked(top_k=4, top_p=0.9)], ids=str
)
def test_frequencies_are_the_softmax_s(kernel: SamplingKernel, one: Asked) -> None:
    shares = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    rows = 400 if one.top_k else 1500
    generator = np.random.default_rng(2)
    words = generator.integers(0, 1 << 32, (rows, 2), dtype=np.uint64).astype(np.uint32)
    asked = [replace(one, add=int(add), multiply=int(mul) | 1) for add, mul in words]
    tokens, _ = drawn(kernel, np.repeat(np.log(shares)[None], rows, axis=0), asked)
    keep = {Asked(): 5, Asked(top_p=0.8): 3, Asked(top_k=3): 3, Asked(min_p=0.2): 4}.get(one, 4)
    if one == Asked(top_k=4, top_p=0.9):
        keep = 4  # 0.85 of 0.95 come before the fourth: less than 0.9
    expected = np.where(np.arange(5) < keep, shares, 0) / shares[:keep].sum()
    counts = np.bincount(tokens, minlength=5) / rows
    assert np.abs(counts - expected).max() < (0.06 if one.top_k else 0.04)


def test_edits_and_logprobs_are_as_ever(kernel: SamplingKernel) -> None:
    logits = normal(3, SMALL)
    asked = [Asked(top_p=0.9), GREEDY, Asked(top_k=5)]
    edits = LogitEdits([0, 1], bias_rows=[0, 1], bias_ids=[8, 9], bias_values=[90.0, 90.0])
    batch = SamplingBatch(random_rows(asked, SMALL), edits, [0, 2], 3)
    mine, usual = sample(mx.array(logits), batch, own=kernel), sample(mx.array(logits), batch)
    for own, other in zip(mine.arrays(), usual.arrays(), strict=True):
        assert np.array_equal(np.array(own), np.array(other))
    assert np.array(mine.tokens).tolist()[:2] == [8, 9]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
def test_a_runner_samples_the_same_tokens(kernel: SamplingKernel, dtype: mx.Dtype) -> None:
    outputs = []
    for own in (kernel, None):
        model = tiny_model("llama")
        model.set_dtype(dtype)
        runner, layout = make_runner(model, vocab_size=VOCAB, head_major=False, sampling=own)
        driver = Driver(runner, layout, 400)
        for index, fields in enumerate(
            (
                {"temperature": 0.0},
                {"top_p": 0.8},
                {"top_k": 5, "presence_penalty": 1.0},
                {"min_p": 0.01, "logprobs": 2},
            )
        ):
            asked = {"max_tokens": 5, "temperature": 1.0, "seed": index, **fields}
            driver.add([3 + index, 5, 7], SamplingParams(**asked))  # type: ignore[arg-type]
        outputs.append(driver.run(16))
    assert outputs[0] == outputs[1] and len(outputs[0]) == 4


def test_the_check_at_start_takes_right_kernels(kernel: SamplingKernel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.runner")
    assert choose_sampling(3001, kernel=kernel) is kernel and "own kernels" in caplog.text


def test_the_check_at_start_refuses_wrong_kernels(
    kernel: SamplingKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right: Any = SamplingKernel.__call__

    def wrong(self: SamplingKernel, logits: mx.array, random: Any) -> Any:
        tokens, finite = right(self, logits, random)
        return (tokens, finite) if random is None else (tokens + 1, finite)

    monkeypatch.setattr(SamplingKernel, "__call__", wrong)
    assert choose_sampling(3001, kernel=kernel) is None and "rows differ" in caplog.text


def test_without_a_gpu_there_are_no_kernels() -> None:
    if mx.default_device() == mx.cpu:
        assert choose_sampling(1000) is None
