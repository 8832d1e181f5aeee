"""Checks the cache of compiled kernels on a CUDA GPU, and times starts with and without it. Not a pytest file.

    python tests/runner/gpu_kernel_cache.py              under two minutes
    python tests/runner/gpu_kernel_cache.py --baseline   also a start in which MLX compiles everything itself

Each step is a process of its own, as MLX loads a kernel once per process. All files go to a temporary folder.

    read      MLX takes a module that was put into its folder: one that computes something else is planted
    bits      every kernel's outputs through the cache are bit for bit those of the kernel that MLX compiles
    starts    of a tiny random model: nothing there yet; kernels there; everything there; kernels there but not
              their source files, so that one that MLX compiled itself would fail

Goes on after a failure; prints all failures at the end and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[2] / "benchmarks"), str(HERE.parent)]

CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "intermediate_size": 2816,
    "num_attention_heads": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": 4096,
    "tie_word_embeddings": False, "max_position_embeddings": 4096, "rope_theta": 10000.0, "head_dim": 64,
}  # fmt: skip
started = time.perf_counter()
failures: list[str] = []
skipped: list[str] = []
limit_s = [116.0]


class OutOfTimeError(Exception):
    """Too little time is left for another process."""


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - started:6.1f}s]", *words, flush=True)


def expect(name: str, good: bool, what: object = "") -> None:
    say("ok" if good else "FAILED", name, what)
    if not good:
        failures.append(f"{name} {what}")


# -- in processes of their own -----------------------------------------------------------------------------


def without_cache() -> None:
    """Kernels go to ``mx.fast.cuda_kernel`` alone."""
    from headrace.runner import build
    from headrace.runner.kernels import language as kernel_language

    none: Any = lambda: None  # noqa: E731
    kernel_language.device_cache = build.device_cache = none


def read_child(_args: argparse.Namespace) -> dict[str, Any]:
    import mlx.core as mx

    from headrace.runner.kernels import cache as kernel_cache
    from headrace.runner.kernels import language as kernel_language

    cache = kernel_cache.device_cache()
    if cache is None:
        return {"value": None}
    plain = cache._compile

    def other(form: kernel_cache.KernelForm) -> kernel_cache.Image:
        text = form.own.replace("y[0] = 1", "y[0] = 2")
        return plain(kernel_cache.KernelForm(form.name, form.mlx, text))

    cache._compile = other
    kernel = kernel_language.cuda_kernel(
        name="planted", input_names=["x"], output_names=["y"], source="y[0] = 1 + x_shape[1] * 0;"
    )
    result = kernel(
        inputs=[mx.zeros((3, 4))],
        template=[("T", mx.float32)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )[0]
    return {"value": result.item(), "note": cache.note()}


def bits_child(args: argparse.Namespace) -> dict[str, Any]:
    import mlx.core as mx
    import numpy as np

    from headrace.runner.kernels import cache as kernel_cache

    if args.plain:
        without_cache()
    begun = time.perf_counter()
    arrays = {}
    for name, array in outputs():
        array = mx.contiguous(array)
        arrays[name] = np.array(array if array.dtype.size == 4 else array.view(mx.uint16))
    seconds = time.perf_counter() - begun
    np.savez(args.out, **arrays)
    cache = None if args.plain else kernel_cache.device_cache()
    return {"seconds": seconds, "note": cache and cache.note(), "faults": cache.faults if cache else 0}


def outputs() -> list[tuple[str, Any]]:
    """Each kernel's outputs on the same random inputs."""
    import mlx.core as mx

    mx.random.seed(0)
    return [*products(), *attention(), *stored(), *experts()]


def normal(*shape: int, dtype: Any = None) -> Any:
    import mlx.core as mx

    return mx.random.normal(shape).astype(dtype or mx.bfloat16)


def products() -> list[tuple[str, Any]]:
    from headrace.runner.products.kernel_products import KernelProducts
    from headrace.runner.products.small_rows import Dense, Norm, Product

    own, found = KernelProducts(), []
    norm, bias = Norm(normal(1024), 1e-5), normal(1024)
    square, wide = Dense(normal(1024, 1024)), Dense(normal(4096, 1024))
    for rows in (5, 40):
        x = normal(rows, 1, 1024)
        kinds = {
            "normed": Product(square, norm),
            "residual": Product(square, residual=x),
            "gated": Product(wide, norm, gated=True),
            "biased": Product(Dense(square.weight, bias)),
        }
        found += [(f"{kind} {rows}", own(x, product)) for kind, product in kinds.items()]
    return found


def attention() -> list[tuple[str, Any]]:
    from kernel_cases import Case, build

    from headrace.runner.attention.paged_decode import PagedDecodeKernel

    kernel = PagedDecodeKernel.for_device()
    assert kernel is not None
    found = []
    for bits in (None, 8):
        for lengths in ((5, 17), (5000, 3)):
            case = Case(
                dtype="bfloat16", widths=(64, 64), ratio=4, kv_heads=2, bits=bits, lengths=lengths, block_size=32
            )
            queries, view, _ = build(case)
            found.append((f"attention {bits} {lengths[0]}", kernel(queries, view, case.scale, None, None, 0.0)))
    return found


def stored() -> list[tuple[str, Any]]:
    import mlx.core as mx

    from headrace.runner.attention.rotate_store import RotarySpec, RotateAndStore
    from headrace.runner.kv.pool import KVPool, LayerShape
    from headrace.runner.kv.store import PoolStore
    from headrace.runner.kv.view import ForwardBatch, GroupBatch, LayerView

    store, rotate = PoolStore.for_device(), RotateAndStore.for_device()
    assert store is not None and rotate is not None
    pool = KVPool([LayerShape(0, 2, 64, 64, mx.bfloat16)], [4], 32, head_major=False, store=store)
    mx.eval(pool.state)
    ends = mx.array([34, 71], mx.int32)
    group = GroupBatch(None, mx.array([33, 70], mx.int32))
    batch = ForwardBatch(offsets=ends - 1, ends=ends, starts=[33, 70], lengths=[1, 1], groups=[group])
    inv_freq = 10000.0 ** (-mx.arange(32) / 32)
    spec = RotarySpec(8, 2, 64, inv_freq, 64, False, 1.0, normal(64), normal(64), 1e-5)
    queries = rotate(normal(2, 12 * 64), LayerView(pool, 0, batch), spec)
    mark = store.write(
        [pool.keys[0], pool.values[0]],
        [normal(2, 2, 64), normal(2, 2, 64)],
        mx.array([0, 99], mx.int32),
        pool.marks[0],
    )
    mx.eval(queries, mark)
    return [("rotated", queries), ("stored keys", pool.keys[0] + 0), ("stored values", pool.values[0] + 0)]


def experts() -> list[tuple[str, Any]]:
    from headrace.runner.products.small_rows import Dense, Norm, plain_product
    from headrace.runner.substitutions.moe_decode import CudaExperts, Experts

    layer = Experts(
        Norm(normal(256), 1e-5), Dense(normal(8, 256)), normal(8, 128, 256), normal(8, 128, 256),
        normal(8, 256, 128), 2, True,
    )  # fmt: skip
    return [("experts", CudaExperts()(normal(6, 1, 256), layer, plain_product))]


def start_child(args: argparse.Namespace) -> dict[str, Any]:
    begun = time.perf_counter()
    from headrace.runner import mlx_environment

    mlx_environment.prepare()
    from headrace.config import EngineConfig
    from headrace.runner.build import build_runner
    from headrace.runner.kernels import cache as kernel_cache
    from headrace.runner.kernels import language as kernel_language

    logging.basicConfig(level=logging.INFO, format="         %(message)s", stream=sys.stderr)
    if args.plain:
        without_cache()
    if args.without_sources:
        kernel_language.write_text = lambda path, text: None
    imported = time.perf_counter()
    stages: dict[str, float] = {}
    last = ["starting", imported]

    def progress(stage: str, _fraction: float) -> None:
        now = time.perf_counter()
        stages[last[0]] = stages.get(last[0], 0.0) + now - last[1]
        last[:] = stage, now

    built = build_runner(EngineConfig(model=args.model, max_model_len=1024, max_num_seqs=8), progress)
    progress("ready", 1.0)
    cache = None if args.plain else kernel_cache.device_cache()
    return {
        "import": imported - begun,
        "seconds": time.perf_counter() - imported,
        "stages": {stage: round(seconds, 2) for stage, seconds in stages.items()},
        "attention": built.ready_info.attention,
        "note": cache and cache.note(),
        "compiled": cache.compiled if cache else None,
        "kept": cache.kept if cache else None,
        "faults": cache.faults if cache else None,
        "folder": os.environ.get(kernel_cache.FOLDER_VARIABLE),
    }


CHILDREN: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "read": read_child,
    "bits": bits_child,
    "start": start_child,
}


# -- the steps ---------------------------------------------------------------------------------------------


def child(folder: Path, *arguments: str, cache: str = "cache") -> dict[str, Any]:
    """What the process prints last, as JSON; ``log``: what it logged."""
    left = limit_s[0] - (time.perf_counter() - started)
    if left < 10:
        raise OutOfTimeError
    environment = {**os.environ, "HEADRACE_CACHE": str(folder / cache), "PYTHONUNBUFFERED": "1"}
    environment.pop("MLX_PTX_CACHE_DIR", None)
    if "--plain" in arguments:
        environment["MLX_PTX_CACHE_DIR"] = str(folder / f"plain-{cache}")
    done = subprocess.run(
        [sys.executable, str(HERE), "--child", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=left,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(done.stderr[-2000:])
    return {**json.loads(lines[-1]), "log": done.stderr}


def attempt(name: str, run: Callable[[], None]) -> None:
    try:
        run()
    except (OutOfTimeError, subprocess.TimeoutExpired):
        skipped.append(name)
    except Exception as error:
        expect(name, False, str(error)[-1500:])


def check_read(folder: Path) -> None:
    got = child(folder, "read", cache="read")
    expect("MLX reads modules that are put into its folder", got["value"] == 2, got.get("note"))


def check_bits(folder: Path) -> None:
    import numpy as np

    ours, plain = folder / "ours.npz", folder / "plain.npz"
    got = child(folder, "bits", "--out", str(ours), cache="bits")
    say(f"kernels through the cache: {got['seconds']:.1f} s; {got['note']}")
    expect("no kernel was left to MLX", got["faults"] == 0, got["log"][-500:] if got["faults"] else "")
    usual = child(folder, "bits", "--out", str(plain), "--plain", cache="bits")
    say(f"kernels through MLX alone: {usual['seconds']:.1f} s")
    left, right = np.load(ours), np.load(plain)
    for name in left.files:
        expect(f"the same bits: {name}", np.array_equal(left[name], right[name]))


def check_starts(folder: Path, baseline: bool) -> None:
    model = ["--model", str(folder / "model")]
    first = start(folder, "nothing there yet", *model)
    expect("kernels were compiled, none left to MLX", first["compiled"] > 0 and first["faults"] == 0)
    expect("the attention kernel serves", first["attention"].startswith("paged decode kernel"), first["attention"])
    modules = Path(first["folder"])
    before = sorted(path.name for path in modules.glob("*.ptx"))
    own = sum(name.startswith("custom_kernel_") for name in before)
    say(f"modules in the folder: {own} of ours, {len(before) - own} of MLX's own")
    shutil.rmtree(folder / "cache/starts", ignore_errors=True)
    second = start(folder, "kernels there", *model)
    expect("the second start compiles nothing", second["compiled"] == 0 and second["kept"] > 0, second["note"])
    after = sorted(path.name for path in modules.glob("*.ptx"))
    expect("nor does MLX", after == before, sorted(set(after) - set(before))[:5])
    start(folder, "everything there", *model)
    shutil.rmtree(folder / "cache/starts", ignore_errors=True)
    for source in (folder / "cache/kernels").glob("*.cuh"):
        source.unlink()
    bare = start(folder, "kernels there, their sources gone", "--without-sources", *model)
    failed = [line for line in bare["log"].splitlines() if "ompil" in line and "CUDA kernels:" not in line]
    expect("no kernel needed its source", bare["compiled"] == 0 and not failed, failed[:3])
    expect("and the same attention serves", bare["attention"].startswith("paged decode kernel"), bare["attention"])
    if baseline:
        start(folder, "MLX compiles everything", "--plain", *model, cache="baseline")


def start(folder: Path, name: str, *arguments: str, cache: str = "cache") -> dict[str, Any]:
    got = child(folder, "start", *arguments, cache=cache)
    say(f"start, {name}: {got['seconds']:.2f} s (and imports {got['import']:.2f}); {got['note']}")
    print("         stages:", got["stages"])
    print("\n".join(line for line in got["log"].splitlines() if line.startswith("         "))[:3000], flush=True)
    return got


def write_model(folder: Path) -> None:
    """Random weights in bfloat16; a tokenizer that fits."""
    from random_checkpoint import write_tokenizer

    code = (
        "import sys, json, importlib; import mlx.core as mx; from mlx.utils import tree_flatten\n"
        "config = json.loads(sys.argv[1])\n"
        "module = importlib.import_module('mlx_lm.models.llama')\n"
        "model = module.Model(module.ModelArgs.from_dict(config)); model.set_dtype(mx.bfloat16)\n"
        "mx.save_safetensors(sys.argv[2], dict(tree_flatten(model.parameters())), {'format': 'mlx'})\n"
    )
    folder.mkdir()
    write_tokenizer(folder, int(str(CONFIG["vocab_size"])))
    described = {**CONFIG, "torch_dtype": "bfloat16", "eos_token_id": 4095, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(described))
    subprocess.run(
        [sys.executable, "-c", code, json.dumps(CONFIG), str(folder / "model.safetensors")],
        check=True,
        env={**os.environ, "MLX_PTX_CACHE_DIR": str(folder.parent / "plain-model")},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--child", choices=sorted(CHILDREN), help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--without-sources", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--baseline", action="store_true", help="also a start in which MLX compiles everything")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(CHILDREN[args.child](args)), flush=True)
        return
    if args.baseline:
        limit_s[0] += 120
    with tempfile.TemporaryDirectory(prefix="headrace-kernels-") as name:
        folder = Path(name)
        attempt("read", lambda: check_read(folder))
        attempt("model", lambda: write_model(folder / "model"))
        attempt("starts", lambda: check_starts(folder, args.baseline))
        attempt("bits", lambda: check_bits(folder))
    say(f"{len(failures)} failures" if failures else "all passed")
    if skipped:
        say("out of time before the end of:", *skipped)
    for failure in failures:
        print(" -", failure)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
