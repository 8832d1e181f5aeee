"""Checkpoints that say known text, on a GPU: 32 requests at once, every token exact. Not a pytest file.

    python tests/runner/gpu_scripted.py plain:bfloat16 swa64:bfloat16 plain:bfloat16:int8 plain:float32

A case is VARIANT:TYPE of the weights, and optionally the type of the KV cache. Pools are small, so that requests
are preempted, fork and share prefixes. Where steps are recorded, a case that replays none fails. Goes on after a
failure; prints all failures at the end and exits with 1.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from support import scripted
from test_scripted_serving import ENDS, Serving, build, prompt, said

from headrace.params import SamplingParams
from headrace.request import EngineRequest

SCRIPTS = ("s00", "s01", "s01", "s01", "s02", "s07")
ROUNDS = 2
started = time.perf_counter()


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - started:5.1f}s]", *words, flush=True)


def checkpoint(folder: Path, variant: str, dtype: str) -> Path:
    """One whose weights are of the type; NumPy has no bfloat16 to write."""
    scripted.build(folder, scripted.VARIANTS[variant])
    for file in folder.glob("*.safetensors"):
        weights = {name: array.astype(getattr(mx, dtype)) for name, array in mx.load(str(file)).items()}
        mx.eval(weights)
        mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
    return folder


def wrong_texts(case: str) -> str | None:
    """What was wrong with the case, or None."""
    variant, dtype, *rest = case.split(":")
    kv_cache_dtype = rest[0] if rest else "auto"
    window = variant.startswith("swa")
    with tempfile.TemporaryDirectory() as folder:
        built = build(checkpoint(Path(folder), variant, dtype), kv_cache_dtype, blocks=60)
    serving = Serving(built)
    rng = random.Random(7)
    expected: dict[str, list[bytes]] = {}
    for number in range(32 * ROUNDS):
        script, count = rng.choice(SCRIPTS), rng.choice([1, 12, 36, 36 if window else 120])
        before = rng.choice(["", "x" * 30, "shared by several prompts, " * 4])
        request = EngineRequest(
            id=f"r{number}",
            prompt_token_ids=prompt(script, before, "y" * rng.choice([0, 3, 8, 21])),
            params=SamplingParams(max_tokens=count, temperature=0.0, stop_token_ids=ENDS),
            n=rng.choice([1, 1, 2]),
        )
        serving.add(request)
        expected[request.id] = scripted.expected_pieces(script, count)
    while serving.step():
        pass
    wrong = [key for key, tokens in serving.tokens.items() if said(tokens) != expected[key[0]]]
    graphs = built.runner._graphs
    say(case, f"{len(serving.tokens)} texts, {graphs.replayed if graphs else 0} steps replayed")
    if wrong:
        return f"{len(wrong)} of {len(serving.tokens)} texts are wrong: {wrong[:4]}"
    return None if graphs is None or graphs.replayed else "no step was replayed"


def main() -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("headrace.runner").setLevel(logging.INFO)
    failures = []
    for case in sys.argv[1:] or ["plain:bfloat16"]:
        try:
            found = wrong_texts(case)
        except Exception as error:
            found = f"{type(error).__name__}: {(str(error).splitlines() or ['?'])[0][:200]}"
        say("ok" if found is None else "FAILED", case, found or "")
        failures += [f"{case}: {found}"] if found else []
    print("\n".join(failures) if failures else "all right")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
