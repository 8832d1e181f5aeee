"""The sampling kernels on a GPU: against the definition in float64, against MLX's operations, and timed.

    python tests/runner/gpu_sampling.py [--seconds 55]

Goes on after a failure; prints all failures at the end and exits with 1. Not a pytest file. What the time does not
reach is named.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent.parent))

from sampling_cases import as_read

from headrace.runner.kernels.language import CUDA_NAMES, compile_ahead, cuda_kernel
from headrace.runner.kernels.recorder import Recorder
from headrace.runner.sampling.batch import SamplingBatch
from headrace.runner.sampling.check import BATCH_KINDS, asked_of, choose_sampling
from headrace.runner.sampling.definition import Asked, fault, random_rows
from headrace.runner.sampling.kernel import KINDS, SamplingKernel
from headrace.runner.sampling.sampler import sample
from headrace.runner.sampling.source import CUDA_SAMPLING_NAMES

VOCABS = (128256, 151936, 49152, 32003)
ROWS = (1, 32, 128)
TIMED = {
    "greedy": Asked(temperature=0.0),
    "temperature": Asked(),
    "top_p 0.9": Asked(temperature=0.7, top_p=0.9),
    "top_k 20, top_p 0.95": Asked(temperature=0.7, top_k=20, top_p=0.95),
    "min_p 0.05": Asked(min_p=0.05),
}
# Random logits: a flat row, in which top_p keeps most tokens, and a steep one, as of a trained model.
SPREADS = {"flat": 0.5, "steep": 4.0}
started = time.perf_counter()
failures: list[str] = []


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - started:5.1f}s]", *words, flush=True)


def check(name: str, run: Callable[[], str | None]) -> None:
    try:
        found = run()
    except Exception as error:
        found = f"{type(error).__name__}: {(str(error).splitlines() or ['?'])[0][:200]}"
    if found is not None:
        failures.append(f"{name}: {found}")
    say("ok" if found is None else "FAILED", name, found or "")


def grid() -> list[Asked]:
    """The timed ones and whatever lies at edges."""
    edges = [
        Asked(temperature, top_k, top_p, min_p)
        for (temperature, min_p), top_k, top_p in product(
            ((0.5, 0.0), (2.0, 0.01)), (0, 1, 300, 5000), (1e-6, 0.5, 0.999, 1.0)
        )
    ]
    return [replace(one, add=index * 2654435761 % 2**32) for index, one in enumerate([*TIMED.values(), *edges])]


def logits_of(rows: int, vocab: int, spread: float, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, vocab), dtype=np.float32) * np.float32(spread)


def definition(kernel: SamplingKernel, vocab: int, dtype: mx.Dtype, spread: float) -> str | None:
    asked = grid()
    given, read = as_read(logits_of(len(asked), vocab, spread), dtype)
    tokens, finite = (np.array(array).tolist() for array in kernel(given, random_rows(asked, vocab)))
    for row, (one, token) in enumerate(zip(asked, tokens, strict=True)):
        found = fault(read[row], one, token)
        if found is not None or not finite[row]:
            return f"row {row}, {one}: {found or 'not finite'}"
    return None


def edges(kernel: SamplingKernel, vocab: int) -> str | None:
    """Bans, NaN, infinities and equal logits."""
    logits = logits_of(7, vocab, 3.0)
    logits[0, 5:] = -np.inf
    logits[1, 300] = np.nan
    logits[2, 300] = np.inf
    logits[3] = -np.inf
    logits[4] = 1.0
    logits[5] = np.round(logits[5])
    logits[6, ::2] = -np.inf
    for one in TIMED.values():
        arrays = kernel(mx.array(logits), random_rows([one] * 7, vocab))
        tokens, finite = (np.array(array).tolist() for array in arrays)
        if finite != [True, False, False, False, True, True, True]:
            return f"{one}: finite {finite}"
        for row in (0, 4, 5, 6):
            found = fault(logits[row], one, tokens[row])
            if found is not None:
                return f"row {row}, {one}: {found}"
    return None


def company(kernel: SamplingKernel, vocab: int) -> str | None:
    """Each row alone, and three times again."""
    asked = grid()
    logits = mx.array(logits_of(len(asked), vocab, 1.0))
    together = np.array(kernel(logits, random_rows(asked, vocab))[0]).tolist()
    for _ in range(3):
        if np.array(kernel(logits, random_rows(asked, vocab))[0]).tolist() != together:
            return "another run, other tokens"
    alone = [kernel(logits[row : row + 1], random_rows([one], vocab))[0] for row, one in enumerate(asked)]
    differing = [row for row, token in enumerate(alone) if token.item() != together[row]]
    return f"rows {differing} differ alone" if differing else None


def beside_mlx(kernel: SamplingKernel) -> str | None:
    logits = mx.random.normal((64, 128256), key=mx.random.key(5)) * 2
    for kind in BATCH_KINDS:
        batch = SamplingBatch(random_rows(asked_of(kind, 64), 128256))
        mine, usual = sample(logits, batch, own=kernel).tokens, sample(logits, batch).tokens
        differing = int(np.array(mine != usual).sum())
        if differing:
            return f"{differing} of 64 {kind} rows differ from MLX's operations"
    return None


def microseconds(run: Callable[[], mx.array], recorder: Recorder | None, repeat: int = 12) -> str:
    """Of one run among several queued, of one that is waited for, and of the device alone."""
    mx.eval(run(), run())
    queued, single = [], []
    for _ in range(3):
        begin = time.perf_counter()
        mx.eval([run() for _ in range(repeat)])
        queued.append((time.perf_counter() - begin) / repeat)
        for _ in range(3):
            begin = time.perf_counter()
            mx.eval(run())
            single.append(time.perf_counter() - begin)
    text = f"{min(queued) * 1e6:6.0f} / {np.median(single) * 1e6:5.0f}"
    try:
        return text if recorder is None else f"{text} / {recorder.device_seconds(lambda: [run()]) * 1e6:5.0f}"
    except RuntimeError:
        return f"{text} /     -"


def times(kernel: SamplingKernel, unsent: SamplingKernel, seconds: float) -> None:
    vocab = 128256
    print("us, one of several queued / one waited for / device's part, where it can be recorded:")
    print("own kernels; own kernels without uploads; MLX's operations")
    recorder = Recorder.for_device()
    for rows in ROWS:
        for (shape, spread), dtype in product(SPREADS.items(), (mx.float32, mx.bfloat16)):
            logits = (mx.random.normal((rows, vocab), key=mx.random.key(rows)) * spread).astype(dtype)
            mx.eval(logits)
            for name, one in TIMED.items():
                if dtype == mx.bfloat16 and (name not in ("greedy", "top_p 0.9") or shape == "steep"):
                    continue
                if time.perf_counter() - started > seconds:
                    say(f"no time for {rows} rows {shape} {name} {dtype}")
                    continue
                asked = [replace(one, add=7919 * row) for row in range(rows)]

                def run(
                    own: SamplingKernel | None, asked: list[Asked] = asked, logits: mx.array = logits
                ) -> mx.array:
                    return sample(logits, SamplingBatch(random=random_rows(asked, vocab)), own=own).tokens

                cells = "; ".join(microseconds(partial(run, own), recorder) for own in (kernel, unsent, None))
                say(f"{rows:4} rows {shape:5} {str(dtype)[9:]:8} {name:21} {cells}")


def checks(kernel: SamplingKernel, seconds: float) -> Iterator[tuple[str, Callable[[], str | None]]]:
    yield "MLX's operations, 64 rows", partial(beside_mlx, kernel)
    yield "edges", partial(edges, kernel, 128256)
    yield "company", partial(company, kernel, 128256)
    for vocab, dtype, spread in product(VOCABS, KINDS, SPREADS.values()):
        if vocab != VOCABS[0] and dtype == mx.float16:
            continue
        if time.perf_counter() - started > seconds:
            say(f"no time for the definition, {vocab} {dtype} {spread}")
            continue
        yield f"definition, {vocab} {dtype} spread {spread}", partial(definition, kernel, vocab, dtype, spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=55.0, help="start nothing after these")
    seconds = parser.parse_args().seconds
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    kernel = SamplingKernel.for_device()
    if kernel is None:
        sys.exit("needs a CUDA GPU")
    compile_ahead(lambda: [kernel(mx.zeros((2, 1000), dtype), None) for dtype in KINDS])
    say("compiled; uploads:", "no" if kernel._uploads is None else "yes")
    for name, run in checks(kernel, seconds * 0.45):
        check(name, run)
    unsent = SamplingKernel(cuda_kernel, CUDA_NAMES + CUDA_SAMPLING_NAMES)
    times(kernel, unsent, seconds)
    chosen = choose_sampling(128256, mx.bfloat16)
    say("at start this device would use", "own kernels" if chosen is not None else "MLX's operations")
    say(f"{len(failures)} failures")
    for failure in failures:
        print("FAILED", failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
