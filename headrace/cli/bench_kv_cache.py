"""``headrace bench-kv-cache [MODEL]``: what packing the KV cache saves and what it costs.

For each kind of KV the model is loaded and a real text is put through it twice over the paged pools: its beginning
as prefill, the rest token by token (the true next token is fed, whatever the model would have said), so every
decode step reads what was packed. Its logits are compared with those over the unpacked pool.

    error        |logits - logits over the unpacked pool|, largest and mean, in logits
    KL           of the next-token distribution from the unpacked one's, nats, mean over positions
    same choice  share of positions whose most likely token is the same
    NLL          mean negative log-likelihood of the text's true tokens, nats
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.bench.stats import percentile
from headrace.cli.bench import OUTPUT_FLAGS, build, emit, prepare_math, read
from headrace.cli.flags import Flag
from headrace.cli.values import integer
from headrace.errors import StartupError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.config import EngineConfig
    from headrace.core.step import ScheduledRow
    from headrace.runner.build import BuiltRunner

    Logits = NDArray[np.float32]

_DESCRIPTION = (
    "Compares kinds of KV cache: bytes per token, error of the logits against the unpacked pool, time. "
    "MODEL and the engine's flags are those of serve."
)
_OWN = (
    Flag("--context", "tokens in the cache when decoding begins", "bench.context", integer(16), "512"),
    Flag("--steps", "decode steps", "bench.steps", integer(2), "32"),
    Flag("--batch", "equal sequences that decode together", "bench.batch", integer(1), "1"),
    *OUTPUT_FLAGS,
)
DTYPES = ("auto", "int8", "int4")


@dataclass(frozen=True, slots=True)
class KVResult:
    """One kind of KV; errors are None for the unpacked one and for one that was refused."""

    kv_cache_dtype: str
    bytes_per_token: int | None = None
    prefill_s: float | None = None
    decode_step_s: float | None = None
    nll: float | None = None
    error_max: float | None = None
    error_mean: float | None = None
    kl_mean: float | None = None
    same_choice: float | None = None
    attention: str | None = None
    refused: str | None = None


def run(argv: Sequence[str]) -> int:
    name, config, own = read("bench-kv-cache", _DESCRIPTION, _OWN, argv)
    if config.kv_cache_dtype != "auto":
        raise StartupError("bench-kv-cache compares all kinds of KV: drop --kv-cache-dtype")
    context, steps = own.get("context", 512), own.get("steps", 32)
    token_ids = text_tokens(config.model, context + steps)
    prepare_math()
    results: list[KVResult] = []
    reference: Logits | None = None
    for dtype in DTYPES:
        print(f"{dtype} …", file=sys.stderr)
        try:
            result, logits = measure(
                replace_dtype(config, dtype), token_ids, context, own.get("batch", 1), reference
            )
        except StartupError as error:
            if dtype == "auto":
                raise
            result, logits = KVResult(dtype, refused=str(error)), None
        reference = logits if dtype == "auto" else reference
        results.append(result)
    report = {"model": name, "context": context, "steps": steps, "batch": own.get("batch", 1),
              "results": [asdict(result) for result in results]}  # fmt: skip
    emit(json.dumps(report, indent=1) if own.get("format") == "json" else _table(report), own.get("output"))
    return 0


def replace_dtype(config: EngineConfig, dtype: str) -> EngineConfig:
    import msgspec

    return msgspec.structs.replace(config, kv_cache_dtype=dtype)


def text_tokens(model: str, count: int) -> list[int]:
    """``count`` tokens of plain prose. Raises ModelFileError: no usable tokenizer."""
    from headrace.bench.texts import NOTES
    from headrace.text.model_text import load

    tokenizer = load(model).tokenizer
    token_ids = tokenizer.encode("\n\n".join(NOTES), parse_special=False)
    while len(token_ids) < count:
        token_ids += token_ids
    return token_ids[:count]


def measure(
    config: EngineConfig, token_ids: Sequence[int], context: int, batch: int, reference: Logits | None
) -> tuple[KVResult, Logits]:
    """One kind of KV, and its logits ``[steps, V]``. Raises StartupError: it cannot be had, or does not fit."""
    built = build(config)
    try:
        return _measure(built, config, token_ids, context, batch, reference)
    finally:
        import gc

        import mlx.core as mx

        del built
        gc.collect()
        mx.clear_cache()


def _measure(
    built: BuiltRunner,
    config: EngineConfig,
    token_ids: Sequence[int],
    context: int,
    batch: int,
    reference: Logits | None,
) -> tuple[KVResult, Logits]:
    import mlx.core as mx
    import numpy as np

    _check_fit(built, len(token_ids), batch)
    began_s = time.perf_counter()
    for index in range(batch):
        for start in range(0, context, config.prefill_step_size):
            end = min(context, start + config.prefill_step_size)
            mx.eval(built.runner.prefill_logits([_row(built, token_ids, index, start, end)]))
    prefill_s = (time.perf_counter() - began_s) / batch
    logits: list[Logits] = []
    times_s: list[float] = []
    for position in range(context, len(token_ids)):
        rows = [_row(built, token_ids, index, position, position + 1) for index in range(batch)]
        began_s = time.perf_counter()
        found = built.runner.decode_logits(rows).astype(mx.float32)
        mx.eval(found)
        times_s.append(time.perf_counter() - began_s)
        logits.append(np.array(found[0]))
    got = np.stack(logits)
    targets = np.array(token_ids[context + 1 :])
    own = log_softmax(got)
    result = KVResult(
        kv_cache_dtype=config.kv_cache_dtype,
        bytes_per_token=built.layout.bytes_per_token,
        prefill_s=prefill_s,
        decode_step_s=percentile(times_s, 50),
        nll=float(-own[np.arange(len(targets)), targets].mean()),
        attention=built.ready_info.attention,
    )
    return (result if reference is None else compared(result, reference, got)), got


def log_softmax(logits: Logits) -> Logits:
    import numpy as np

    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def compared(result: KVResult, expected: Logits, got: Logits) -> KVResult:
    """``result`` with what its logits ``[steps, V]`` differ in from those over the unpacked pool."""
    import numpy as np

    difference = np.abs(got - expected)
    before, after = log_softmax(expected), log_softmax(got)
    kl = (np.exp(before) * (before - after)).sum(axis=-1)
    return replace(
        result,
        error_max=float(difference.max()),
        error_mean=float(difference.mean()),
        kl_mean=float(kl.mean()),
        same_choice=float((expected.argmax(-1) == got.argmax(-1)).mean()),
    )


def _check_fit(built: BuiltRunner, length: int, batch: int) -> None:
    longest = built.ready_info.max_model_len
    if length > longest:
        raise StartupError(f"--context and --steps are {length} tokens; the longest sequence here has {longest}")
    needed = batch * _blocks(built, length)
    if needed > min(built.num_blocks):
        raise StartupError(
            f"--batch {batch} of {length} tokens needs {needed} blocks; the pool has {min(built.num_blocks)}"
        )


def _blocks(built: BuiltRunner, length: int) -> int:
    return -(-length // built.layout.block_size)


def _row(built: BuiltRunner, token_ids: Sequence[int], index: int, start: int, end: int) -> ScheduledRow:
    """Positions start … end - 1 of sequence ``index``, whose blocks lie one after the other."""
    from headrace.core.step import ScheduledRow
    from headrace.params import SamplingParams

    first = 1 + index * _blocks(built, len(token_ids))
    table = tuple(range(first, first + _blocks(built, end)))
    return ScheduledRow(
        seq_id=index,
        start=start,
        num_tokens=end - start,
        token_ids=tuple(token_ids[start:end]),
        block_tables=(table,) * len(built.layout.groups),
        samples=True,
        sample_position=end,
        seed=0,
        params=SamplingParams(max_tokens=1, temperature=0.0),
        num_prompt_tokens=len(token_ids),
    )


_COLUMNS: Sequence[tuple[str, str, str, float]] = (
    ("bytes/token", "bytes_per_token", ",.0f", 1),
    ("prefill ms", "prefill_s", ",.0f", 1000),
    ("step ms", "decode_step_s", ".2f", 1000),
    ("NLL", "nll", ".4f", 1),
    ("error max", "error_max", ".4f", 1),
    ("error mean", "error_mean", ".5f", 1),
    ("KL", "kl_mean", ".2e", 1),
    ("same choice %", "same_choice", ".1f", 100),
)


def _table(report: dict[str, Any]) -> str:
    size = f"{report['context']} tokens of context, {report['steps']} steps of {report['batch']} rows"
    lines = [
        f"{report['model']}: {size}",
        "",
        f"{'KV':<6}" + "".join(f"{title:>15}" for title, *_ in _COLUMNS),
    ]
    for result in report["results"]:
        lines.append(f"{result['kv_cache_dtype']:<6}" + "".join(_cells(result)))
        if result["refused"]:
            lines.append(f"      refused: {result['refused']}")
    return "\n".join(lines)


def _cells(result: dict[str, Any]) -> Iterator[str]:
    for _, name, pattern, scale in _COLUMNS:
        value = result[name]
        yield f"{'-' if value is None else format(value * scale, pattern):>15}"
