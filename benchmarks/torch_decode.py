"""Milliseconds per decode step in PyTorch with one CUDA graph per step: what the machine allows a good engine.

    python benchmarks/torch_decode.py --shape llama-1b --rows 1,5,32,128 --context 256,2048

Dense Llama-like shapes, bfloat16, random weights. One step is: embedding, and per layer RMS norm, one product for
q, k and v, rotary embedding, keys and values written into a static cache ``[rows, kv_heads, context + 1, D]``,
scaled_dot_product_attention over all of it, output product added to the residual by the product itself, RMS norm,
one product for gate and up, down; then norm, head and argmax, whose tokens are the next step's input. A group's
query heads are the rows of one attention (they see the same keys), so keys and values are read once. The position
stays where it is: each step attends to ``context + 1`` positions. Steps are launched one ahead, and the tokens of
every step are read on the host.

Prints one JSON line per cell: ``torch_ms``, or ``bytes`` when the cell does not fit into the device's memory.
Needs PyTorch alone. ``--device cpu`` runs the same model without graphs, to test it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

from shapes import SHAPES, is_dense

WARM_UP_STEPS = 3
SPARE_BYTES = 4 << 30  # activations, logits, the graph's own pool, cuBLAS workspaces


class Layer:
    """Weights of one block; ``[outputs, inputs]``, as in every linear layer."""

    def __init__(self, config: dict[str, Any], make: Callable[..., torch.Tensor]) -> None:
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        size = head_size(config)
        self.attention_norm = make(hidden, ones=True)
        self.qkv = make((heads + 2 * kv_heads) * size, hidden)
        self.qkv_bias = make((heads + 2 * kv_heads) * size) if config["model_type"] == "qwen2" else None
        normed = config["model_type"] == "qwen3"
        self.q_norm, self.k_norm = (make(size, ones=True), make(size, ones=True)) if normed else (None, None)
        self.output = make(hidden, heads * size)
        self.mlp_norm = make(hidden, ones=True)
        self.gate_up = make(2 * inner, hidden)
        self.down = make(hidden, inner)


class Decoder:
    """Decode steps of ``rows`` rows at one context length; ``ids`` holds the tokens of the last step."""

    def __init__(self, config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        generator = torch.Generator(device).manual_seed(0)

        def make(*shape: int, ones: bool = False) -> torch.Tensor:
            made = torch.empty(shape, device=device, dtype=dtype)
            return made.fill_(1.0) if ones else made.normal_(0.0, 0.02, generator=generator)

        self.embedding = make(config["vocab_size"], config["hidden_size"])
        self.head = (
            self.embedding if config["tie_word_embeddings"] else make(config["vocab_size"], config["hidden_size"])
        )
        self.layers = [Layer(config, make) for _ in range(config["num_hidden_layers"])]
        self.norm = make(config["hidden_size"], ones=True)

    def reset(self, rows: int, context: int) -> None:
        """Rows with ``context`` positions of random keys and values behind them."""
        config = self.config
        size = head_size(config)
        shape = (rows, config["num_key_value_heads"], context + 1, size)
        self.keys, self.values = ([self._random(shape) for _ in self.layers] for _ in range(2))
        self.ids = torch.ones(rows, device=self.device, dtype=torch.long)
        self.position = torch.full((1,), context, device=self.device, dtype=torch.long)
        exponents = torch.arange(0, size, 2, device=self.device, dtype=torch.float32) / size
        angle = context * config["rope_theta"] ** -exponents
        self.rotation = torch.polar(torch.ones_like(angle), angle)  # [D / 2]

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_(0.0, 1.0)

    def step(self) -> None:
        """One token per row: ``ids`` in, ``ids`` out."""
        x = F.embedding(self.ids, self.embedding)
        for index, layer in enumerate(self.layers):
            attended = self._attention(index, layer, self._norm(x, layer.attention_norm))
            x.addmm_(attended, layer.output.t())
            gate, up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            x.addmm_(F.silu(gate).mul_(up), layer.down.t())
        logits = F.linear(self._norm(x, self.norm), self.head)
        torch.argmax(logits, dim=-1, out=self.ids)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config["rms_norm_eps"])

    def _attention(self, index: int, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], head_size(config)
        rows = x.shape[0]
        projected = F.linear(x, layer.qkv, layer.qkv_bias).view(rows, heads + 2 * kv_heads, size)
        turned, values = projected.split((heads + kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = turned.split((heads, kv_heads), dim=1)
            turned = torch.cat((self._norm(queries, layer.q_norm), self._norm(keys, layer.k_norm)), dim=1)
        queries, keys = self._rotate(turned).split((heads, kv_heads), dim=1)
        self.keys[index].index_copy_(2, self.position, keys.unsqueeze(2))
        self.values[index].index_copy_(2, self.position, values.unsqueeze(2))
        grouped = queries.reshape(rows, kv_heads, heads // kv_heads, size)
        attended = F.scaled_dot_product_attention(grouped, self.keys[index], self.values[index])
        return attended.reshape(rows, heads * size)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of neighbouring pairs: as many bytes and operations as of halves."""
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.rotation).flatten(-2).to(self.dtype)


def head_size(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def weight_bytes(config: dict[str, Any]) -> int:
    """Bytes of all weights at 16 bits, norms and biases left out."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = hidden * (2 * heads + 2 * kv_heads) * head_size(config) + 3 * hidden * inner
    return 2 * (layer * config["num_hidden_layers"] + hidden * vocab * (1 if config["tie_word_embeddings"] else 2))


def kv_bytes(config: dict[str, Any], rows: int, context: int) -> int:
    """Bytes of the rows' keys and values at 16 bits."""
    per_token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size(config)
    return rows * (context + 1) * per_token


class Stepper:
    """A captured step that is replayed one ahead of the host."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_STEPS):
                decoder.step()
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            decoder.step()
        rows = decoder.ids.shape[0]
        self._slots = [
            (torch.empty(rows, dtype=torch.long, pin_memory=True), torch.cuda.Event()) for _ in range(2)
        ]

    def run(self, steps: int) -> float:
        """Seconds per step; every step's tokens are read before the step after the next one is launched."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for step in range(steps):
            tokens, copied = self._slots[step % 2]
            self._graph.replay()
            tokens.copy_(self._decoder.ids, non_blocking=True)
            copied.record()
            if step:
                self._read(step - 1)
        self._read(steps - 1)
        return (time.perf_counter() - start) / steps

    def _read(self, step: int) -> None:
        tokens, copied = self._slots[step % 2]
        copied.synchronize()
        tokens.tolist()


class EagerStepper:
    """The same without a graph, on any device."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        decoder.step()

    def run(self, steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            self._decoder.step()
            self._decoder.ids.tolist()
        return (time.perf_counter() - start) / steps


@torch.inference_mode()
def measure(decoder: Decoder, rows: int, context: int, steps: int) -> float:
    """Milliseconds per step: the best of three runs of ``steps`` steps."""
    decoder.reset(rows, context)
    stepper = Stepper(decoder) if decoder.device.type == "cuda" else EagerStepper(decoder)
    return 1e3 * min(stepper.run(steps) for _ in range(3))


def free_bytes(device: torch.device) -> int | None:
    """Of the device's memory; None: not known, everything is tried."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", required=True, help=", ".join(name for name in SHAPES if is_dense(name)))
    parser.add_argument("--rows", default="1,5,32,128")
    parser.add_argument("--context", default="256,2048")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, help="instead of the shape's number, for a test")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=float("inf"), help="begin no cell after so many seconds")
    args = parser.parse_args()
    if not is_dense(args.shape):
        parser.error(f"{args.shape} has experts; only dense shapes are built here")
    began = time.monotonic()
    device = torch.device(args.device)
    config = dict(SHAPES[args.shape])
    if args.layers:
        config["num_hidden_layers"] = args.layers
    decoder: Decoder | None = None
    for context in map(int, args.context.split(",")):
        for rows in map(int, args.rows.split(",")):
            if time.monotonic() - began > args.budget:
                sys.exit(0)
            cell: dict[str, Any] = {"shape": args.shape, "rows": rows, "context": context}
            needed = kv_bytes(config, rows, context) + SPARE_BYTES
            needed += weight_bytes(config) if decoder is None else 0
            free = free_bytes(device)
            if free is not None and needed > free:
                cell |= {"bytes": needed, "free_bytes": free}
            else:
                decoder = decoder or Decoder(config, device, torch.bfloat16)
                cell["torch_ms"] = round(measure(decoder, rows, context, args.steps), 3)
                decoder.keys = decoder.values = []
            print(json.dumps(cell), flush=True)


if __name__ == "__main__":
    main()
