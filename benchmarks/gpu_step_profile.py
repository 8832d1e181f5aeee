"""Where one decode step's time goes: kernels on the device, gaps between them, pieces of work on the host.

    python benchmarks/gpu_step_profile.py --shapes llama-1b,llama-8b --rows 1,32,128 --context 256,2048
    python benchmarks/gpu_step_profile.py --shapes tiny --rows 1,3 --context 64 --steps 4     # any machine

Steps as in gpu_decode.py. Three turns per cell, each of ``--steps`` steps:

    wall      microseconds per step, nothing else looked at
    host      the runner's pieces under stopwatches; a piece's time is without the pieces inside it. ``wait`` is
              the host idle until the device has a step's tokens. The scheduler, which these steps do without,
              is timed by itself with results made up
    device    under ``torch.profiler``, whose CUPTI records every kernel of the process, MLX's too, and calls of
              the CUDA runtime. Recording takes time: compare shares, and the wall time with the first one

Without PyTorch in this interpreter, or without a GPU, the device's part says so and is left out.
"""

# ruff: noqa: E402 (MLX reads its settings when it is imported)

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.runner import mlx_environment

mlx_environment.prepare()  # as a worker does

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent))

import kernel_table
from decode_report import Budget, Cell, Grid
from gpu_decode import SPARE_BYTES, HeadraceStep, device_bytes, prepare
from model_shapes import held_packed, random_model, weight_bytes
from shapes import SHAPES
from simulate import fake_result

from headrace.core.layout import KVLayout, LayerGroup
from headrace.core.scheduler import Scheduler, SchedulerConfig
from headrace.params import SamplingParams
from headrace.request import EngineRequest
from headrace.runner import model_runner
from headrace.runner.kv.layout import read_layout
from headrace.runner.model_runner import RunnerOptions
from headrace.runner.sampling.check import choose_sampling


def on_gpu() -> bool:
    return bool(mx.default_device() == mx.gpu)


# -- the host ------------------------------------------------------------------------------------------


class Stopwatches:
    """Seconds by piece of work, each without the pieces inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def around(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._stack.append(label)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._stack.pop()

        return timed

    @contextmanager
    def on(self, places: list[tuple[Any, str, str]]) -> Iterator[None]:
        """Time these functions: (owner, attribute, label); None is skipped."""
        kept = [(owner, name, vars(owner).get(name, ...), getattr(owner, name)) for owner, name, _ in places]
        try:
            for (owner, name, label), (*_, function) in zip(places, kept, strict=True):
                if function is not None:
                    setattr(owner, name, self.around(label, function))
            yield
        finally:
            for owner, name, own, function in kept:
                if own is ...:  # a method, found on its class
                    delattr(owner, name)
                else:
                    setattr(owner, name, function)


def host_us(bench: HeadraceStep, steps: int) -> dict[str, float]:
    """Microseconds per step by piece of work."""
    runner = bench.runner
    watches = Stopwatches()
    places = [
        (bench, "launch", "rows of the step (this script), launch"),
        (runner._inputs, "build", "build inputs"),
        (runner._inputs, "decode_inputs", "build inputs"),
        (model_runner, "feed_of", "input tokens"),
        (model_runner, "fed_tokens", "input tokens"),
        (runner, "_forward", "graph building, not compiled"),
        (runner, "_sample", "sampling graph"),
        (mx, "async_eval", "start (async_eval)"),
        (mx, "eval", "wait (eval)"),
        (runner, "read", "read results, and wait for them"),
        (model_runner, "_to_host", "results of the rows"),
    ]
    if runner._traced is not None:
        places.append((runner._traced, "decode", "graph building, compiled call"))
    if runner._graphs is not None:
        places.append((runner._graphs, "run", "recorded step: inputs, launch"))
    with watches.on(places):
        bench.run = watches.around("rest", bench.run)
        bench.run(steps)
        del bench.run
    found = {label: seconds / steps * 1e6 for label, seconds in watches.seconds.items()}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def scheduler_us(rows: int, context: int, steps: int) -> dict[str, float]:
    """Microseconds of ``schedule`` and ``update`` per decode step at so many running sequences."""
    size = 32
    config = SchedulerConfig(max_num_seqs=rows, max_model_len=1 << 20, prefill_step_size=1 << 16)
    per_row = -(-(context + 4 * steps + 64) // size) + 1
    scheduler = Scheduler(config, KVLayout(size, (LayerGroup("full", 32, 131072),)), (rows * per_row,))
    params = SamplingParams(max_tokens=1 << 19, temperature=0.0)
    for number in range(rows):
        prompt = [(number * 31 + position) % 32000 for position in range(context)]
        scheduler.add_request(EngineRequest(id=str(number), prompt_token_ids=prompt, params=params), 0.0)
    pending, measured = None, 0
    total = {"schedule": 0.0, "update": 0.0}
    for _ in range(rows * (context + 1) + 2 * steps):
        began = time.perf_counter()
        output = scheduler.schedule(0.0)
        scheduled = time.perf_counter()
        result = fake_result(output, 0.01)
        before = time.perf_counter()
        if pending is not None:
            scheduler.update(pending, 0.0)
        if len(output.decode) == rows and measured < steps:
            measured += 1
            total["schedule"] += scheduled - began
            total["update"] += time.perf_counter() - before
        pending = result
        if measured == steps or output.is_empty:
            break
    return {name: seconds / max(1, measured) * 1e6 for name, seconds in total.items()}


# -- the device ----------------------------------------------------------------------------------------


def device_trace(work: Callable[[], object]) -> dict[str, Any] | str:
    """The trace of ``work`` under torch.profiler, or one line that says why there is none."""
    if not on_gpu():
        return "no GPU here"
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError as error:
        return f"no PyTorch in {sys.executable}: {error}"
    if not torch.cuda.is_available():
        return "this PyTorch sees no CUDA device"
    try:
        torch.zeros(1, device="cuda")  # its context, before anything is recorded
        torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                work()
                mx.synchronize()
                torch.cuda.synchronize()
            profiler.export_chrome_trace(str(path))
            trace: dict[str, Any] = json.loads(path.read_bytes())
        return trace
    except Exception as error:  # what was measured without the profiler is worth keeping
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def report_device(trace: dict[str, Any] | str, steps: int, most: int) -> Cell:
    """Print the tables; what belongs into the JSON."""
    if isinstance(trace, str):
        print(f"device: {trace}", flush=True)
        return {"device": trace}
    kernels = kernel_table.spans(trace, kernel_table.DEVICE)
    if not kernels:
        print("device: the profiler recorded no kernel (CUPTI is not usable here)", flush=True)
        return {"device": "no kernel was recorded"}
    whole = kernel_table.device(kernels, steps)
    by_name = kernel_table.lines(kernel_table.added(kernels), steps)
    calls = kernel_table.lines(kernel_table.spans(trace, kernel_table.HOST), steps)
    idle = whole.span_us - whole.busy_us
    print(
        f"device, µs per step: {whole.span_us:.0f} from the first kernel to the last, busy {whole.busy_us:.0f}, "
        f"idle {idle:.0f} ({idle / whole.span_us:.1%}), of it {whole.small_gaps_us:.0f} in gaps below "
        f"{kernel_table.GAP_US:g} µs; {len(kernels) / steps:.0f} kernels"
    )
    print(kernel_table.table(by_name, most, "kernel, from the end of the one before on"))
    print(kernel_table.table(whole.gaps, 8, "gap between"))
    print(kernel_table.table(calls, 8, "call of the host"), flush=True)
    return {
        "device": {**asdict(whole), "gaps": [asdict(line) for line in whole.gaps[:8]]},
        "kernels": [asdict(line) for line in by_name[:most]],
        "calls": [asdict(line) for line in calls[:8]],
    }


# -- the grid ------------------------------------------------------------------------------------------


def measure(model: Any, rows: int, context: int, args: argparse.Namespace) -> Cell:
    steps = args.steps
    options = RunnerOptions(compile=on_gpu() and not args.no_compile, max_prefill_rows=1)
    sampling = choose_sampling(int(model(mx.zeros((1, 1), mx.int32)).shape[-1]))
    bench = HeadraceStep(model, rows, context, 6 * steps + 8, options, sampling)
    bench.run(steps)
    wall_us = min(bench.run(steps), bench.run(steps)) * 1e6
    host = host_us(bench, steps)
    host |= {f"scheduler: {name}": us for name, us in scheduler_us(rows, context, steps).items()}
    print(f"wall: {wall_us:.0f} µs per step\nhost, µs per step:")
    for label, us in host.items():
        print(f"  {us:9.1f}  {label}")
    under: list[float] = []
    device = report_device(device_trace(lambda: under.append(bench.run(steps))), steps, args.top)
    bench.handle.result()
    if under:
        device["wall_under_profiler_us"] = round(under[0] * 1e6, 1)
        print(f"wall while recorded: {under[0] * 1e6:.0f} µs per step", flush=True)
    return {"wall_us": round(wall_us, 1), "host_us": {k: round(v, 1) for k, v in host.items()}, **device}


def shape(name: str, bits: int, args: argparse.Namespace, budget: Budget, cells: list[Cell]) -> None:
    model = random_model(name, bits=bits)
    if bits < 16 and on_gpu() and not mx.metal.is_available():
        model = held_packed(model, both=True)
    kernel = prepare(model)
    print(f"{name}, {bits} bits: {kernel}, {budget.used_s:.0f} s", flush=True)
    memory = device_bytes()
    for rows, context in Grid.parse(args.rows, args.context).cells(budget):
        print(f"\n## {name}, {bits} bits, {rows} rows, context {context}", flush=True)
        cell: Cell = {"shape": name, "bits": bits, "rows": rows, "context": context, "attention": kernel}
        kv = read_layout(model, 32).layout.bytes_per_token * rows * (context + 6 * args.steps + 64)
        needed = weight_bytes(model) + kv + SPARE_BYTES
        if memory is not None and needed > memory:
            cell["bytes"] = needed
        else:
            try:
                cell |= measure(model, rows, context, args)
            except Exception as error:  # one cell's fault must not cost the others, device time is scarce
                cell["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                print(cell["error"], flush=True)
        cells.append(cell)
        if args.json:
            Path(args.json).write_text(json.dumps(cells, indent=1))
        gc.collect()
        mx.clear_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shapes", default="llama-1b,llama-8b", help=",".join(SHAPES))
    add("--bits", default="16", help="of the weights; below 16 both forms are held on CUDA, as by the server")
    add("--rows", default="1,32,128")
    add("--context", default="256,2048")
    add("--steps", type=int, default=20)
    add("--top", type=int, default=24, help="kernels in the table")
    add("--no-compile", action="store_true")
    add("--budget", type=float, default=float("inf"), metavar="SECONDS")
    add("--json", metavar="FILE", help="written after every cell")
    args = parser.parse_args()
    budget, cells = Budget.starting_now(args.budget), list[Cell]()
    forms = [(name, int(bits)) for name in args.shapes.split(",") for bits in args.bits.split(",")]
    for done, (name, bits) in enumerate(forms):
        part = budget.part(len(forms) - done)
        if not part.is_over:
            shape(name, bits, args, part, cells)
            gc.collect()
            mx.clear_cache()
    if budget.is_limited:
        print(f"{budget.used_s:.0f} of {args.budget:.0f} s used")


if __name__ == "__main__":
    main()
