"""``headrace bench [MODEL]``: what the engine does without HTTP, tokenizer and gateway.

Requests of random tokens (nothing shared, nothing cached) are all there from the beginning; scheduler and model
runner run in this process, step by step, as a worker runs them. So the difference to ``bench-serve`` at the same
concurrency is what serving costs.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headrace.bench.stats import Distribution
from headrace.cli.flags import Flag, FlagTable, UsageError, collect, make_parser, read_arguments
from headrace.cli.serve_flags import SERVE_FLAGS
from headrace.cli.values import choice, integer, output_file
from headrace.errors import StartupError

if TYPE_CHECKING:
    from headrace.config import EngineConfig
    from headrace.runner.build import BuiltRunner
    from headrace.worker.engine import Engine

_DESCRIPTION = "Measures the engine in this process. MODEL and the engine's flags are those of serve."
OUTPUT_FLAGS = (
    Flag("--format", "what is written", "bench.format", choice("table", "json"), "table"),
    Flag("--output", "write to this file", "bench.output", output_file("FILE"), "standard output"),
)
_OWN = (
    Flag("--num-requests", "requests, all there from the beginning", "bench.num_requests", integer(1), "16"),
    Flag("--num-prompts", alias_of="--num-requests"),
    Flag("--prompt-tokens", "prompt tokens of each", "bench.prompt_tokens", integer(1), "512"),
    Flag("--max-tokens", "output tokens of each", "bench.max_tokens", integer(1), "128"),
    Flag("--repetitions", "runs", "bench.repetitions", integer(1), "1"),
    Flag("--seed", "of the prompts", "bench.seed", integer(0), "0"),
    *OUTPUT_FLAGS,
)


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """One run; times in seconds from its begin. ``step_s``: device time of steps."""

    duration_s: float
    completed: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    first_token_s: Distribution
    end_s: Distribution
    step_s: Distribution
    steps: int
    preemptions: int
    peak_memory_bytes: int


def engine_table(title: str, own: Sequence[Flag]) -> FlagTable:
    """``own`` flags, and those of serve that set something of the engine or of a download."""
    shared = {
        group: [flag for flag in flags if flag.target.startswith(("engine.", "download."))]
        for group, flags in SERVE_FLAGS.groups
    }
    names = {flag.name for flag in own}
    return FlagTable.of(
        {
            title: own,
            **{
                group: [_resolved(flag) for flag in flags if flag.name not in names]
                for group, flags in shared.items()
                if flags
            },
        }
    )


def _resolved(flag: Flag) -> Flag:
    """Aliases of serve's table are resolved already."""
    from dataclasses import replace

    return replace(flag, alias_of="")


def read(
    command: str, description: str, own: Sequence[Flag], argv: Sequence[str]
) -> tuple[str, Any, dict[str, Any]]:
    """Name of MODEL, the engine's configuration (MODEL is fetched when it has to be), values of ``own`` flags."""
    from headrace.cli.serve import locate
    from headrace.cli.settings import check, engine_config, section

    table = engine_table(command, own)
    positional, given = read_arguments(make_parser(command, "[MODEL] [options]", description, table), table, argv)
    if len(positional) > 1:
        raise UsageError(f"one MODEL, not {len(positional)}: unexpected {positional[1]!r}")
    values = collect(given)
    check(values)
    path, name = locate(positional[0] if positional else None, section(values, "download"))
    return name, engine_config(values, path), section(values, "bench")


def run(argv: Sequence[str]) -> int:
    name, config, own = read("bench", _DESCRIPTION, _OWN, argv)
    prompt_tokens, max_tokens = own.get("prompt_tokens", 512), own.get("max_tokens", 128)
    num_requests, repetitions = own.get("num_requests", 16), own.get("repetitions", 1)
    prepare_math()
    built = build(config)
    info = built.ready_info
    if prompt_tokens + max_tokens > info.max_model_len:
        raise StartupError(
            f"{prompt_tokens} + {max_tokens} tokens are more than the longest sequence of {info.max_model_len}: "
            "lower --prompt-tokens or --max-tokens"
        )
    runs = []
    for repetition in range(repetitions):
        picker = random.Random(f"{own.get('seed', 0)}:{repetition}")
        prompts = [[picker.randrange(info.vocab_size) for _ in range(prompt_tokens)] for _ in range(num_requests)]
        runs.append(run_offline(built, config, prompts, max_tokens, repetition))
        print(f"#{repetition + 1}: {runs[-1].output_tokens_per_s:.1f} output tok/s", file=sys.stderr)
    report = {
        "model": name,
        "device": info.device,
        "attention": info.attention,
        "kv_cache_dtype": config.kv_cache_dtype,
        "num_requests": num_requests,
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        "max_num_seqs": config.max_num_seqs,
        "runs": [asdict(one) for one in runs],
    }
    emit(json.dumps(report, indent=1) if own.get("format") == "json" else _table(report, runs), own.get("output"))
    return 1 if any(one.failed for one in runs) else 0


def emit(rendered: str, output: str | None) -> None:
    """Raises StartupError: the file cannot be written."""
    if output is None:
        print(rendered)
        return
    try:
        with open(output, "w", encoding="utf-8") as file:
            file.write(rendered + "\n")
    except OSError as error:
        raise StartupError(f"--output {output}: {error.strerror}") from None


def prepare_math() -> None:
    """The matrix library and the settings that MLX takes when it is imported; once, before the first ``build``."""
    from headrace.runner import mlx_environment
    from headrace.runner.cpu import blas

    blas.prepare()
    mlx_environment.prepare()


def build(config: EngineConfig) -> BuiltRunner:
    """A runner that is ready, as a worker makes it. Raises StartupError."""
    from headrace.runner.build import build_runner

    return build_runner(config, lambda stage, fraction: None)


def run_offline(
    built: BuiltRunner, config: EngineConfig, prompts: Sequence[list[int]], max_tokens: int, number: int
) -> OfflineRun:
    """Run all ``prompts`` to ``max_tokens`` greedy tokens each, end tokens ignored."""
    import tempfile
    from dataclasses import replace
    from pathlib import Path

    from headrace.core.scheduler import Scheduler
    from headrace.worker.engine import Engine
    from headrace.worker.step_record import StepRecord

    limits = replace(built.scheduler_config, max_queue=max(config.max_queue, len(prompts)))
    with tempfile.TemporaryDirectory() as folder:
        record = StepRecord(str(Path(folder) / "steps"))
        try:
            engine = Engine(Scheduler(limits, built.layout, built.num_blocks), built.runner, record, _memory)
            return _drive(engine, prompts, max_tokens, number)
        finally:
            record.close()


def _memory() -> Any:
    import mlx.core as mx

    from headrace.worker.engine import MemoryUse

    return MemoryUse(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())


def _drive(engine: Engine, prompts: Sequence[list[int]], max_tokens: int, number: int) -> OfflineRun:
    from headrace.params import SamplingParams
    from headrace.request import EngineRequest, FinishReason
    from headrace.worker.protocol import AddRequest, Rejected

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    began_s = time.perf_counter()
    for index, prompt in enumerate(prompts):
        request = EngineRequest(id=f"{number}-{index}", prompt_token_ids=prompt, params=params)
        answer = engine.handle(AddRequest(request))
        if isinstance(answer, Rejected):
            raise StartupError(f"the engine refused a request: {answer.message}")
    first_s: dict[str, float] = {}
    end_s: dict[str, float] = {}
    steps_s: list[float] = []
    tokens = failed = 0
    steps_before = engine.stats().steps_total
    while engine.has_work:
        outputs = engine.step()
        now_s = time.perf_counter() - began_s
        if outputs is None:
            continue
        if outputs.stats.steps_total > steps_before + len(steps_s):
            steps_s.append(outputs.stats.step_s)
        for output in outputs.outputs:
            tokens += len(output.token_ids)
            if output.token_ids:
                first_s.setdefault(output.request_id, now_s)
            if output.finish_reason is not None:
                end_s[output.request_id] = now_s
                failed += output.finish_reason is FinishReason.ERROR
    duration_s = time.perf_counter() - began_s
    stats = engine.stats()
    prompt_tokens = sum(map(len, prompts))
    return OfflineRun(
        duration_s=duration_s,
        completed=len(end_s) - failed,
        failed=failed,
        prompt_tokens=prompt_tokens,
        output_tokens=tokens,
        output_tokens_per_s=tokens / duration_s,
        total_tokens_per_s=(tokens + prompt_tokens) / duration_s,
        first_token_s=Distribution.of(first_s.values()),
        end_s=Distribution.of(end_s.values()),
        step_s=Distribution.of(steps_s),
        steps=len(steps_s),
        preemptions=stats.preemptions_total,
        peak_memory_bytes=stats.peak_bytes,
    )


def _table(report: dict[str, Any], runs: Sequence[OfflineRun]) -> str:
    titles = ("run", "out tok/s", "all tok/s", "first token p50", "step p50", "peak MiB", "failed")
    lines = [
        f"{report['model']} on {report['device']}, {report['attention']}",
        f"{report['num_requests']} requests of {report['prompt_tokens']} + {report['max_tokens']} tokens",
        "",
        "".join(f"{title:>17}" for title in titles),
    ]
    for number, one in enumerate(runs, 1):
        first, step = (
            "-" if value is None else f"{value * 1000:,.1f} ms"
            for value in (one.first_token_s.p50, one.step_s.p50)
        )
        rates = (f"{one.output_tokens_per_s:,.1f}", f"{one.total_tokens_per_s:,.1f}")
        peak = f"{one.peak_memory_bytes / 2**20:,.0f}"
        lines.append("".join(f"{value:>17}" for value in (number, *rates, first, step, peak, one.failed)))
    return "\n".join(lines)
