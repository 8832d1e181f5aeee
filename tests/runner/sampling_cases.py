"""What a sampled token may be, by the definition in float64; shared by the emulated kernels and the GPU's."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from headrace.runner.sampling_batch import RandomRows, Truncation

# Mass by which a border may be off, and noisy logits that count as equal.
BORDER = 1e-6
NEAR = 1e-5


@dataclass(frozen=True)
class Asked:
    """A row's parameters; zeros, and a top_p of 1, are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    add: int = 0x12345678
    multiply: int = 0x9E3779B1


def random_rows(asked: list[Asked], vocab: int, *, truncation: bool | None = None) -> RandomRows | None:
    """As ``build_sampling_batch`` gathers them."""
    chosen = [index for index, one in enumerate(asked) if one.temperature > 0]
    if not chosen:
        return None
    rows = [asked[index] for index in chosen]
    if truncation is None:
        truncation = any(one.top_k or one.top_p < 1 or one.min_p for one in rows)
    made = Truncation(
        np.array([one.top_k if 0 < one.top_k < vocab else vocab for one in rows], np.int32),
        np.array([one.top_p if one.top_p < 1 else 2.0 for one in rows], np.float32),
        np.array([one.min_p for one in rows], np.float32),
        bounded=False,
    )
    return RandomRows(
        None if len(chosen) == len(asked) else chosen,
        np.array([max(one.temperature, 1e-4) for one in rows], np.float32),
        np.array([one.add for one in rows], np.uint32),
        np.array([one.multiply for one in rows], np.uint32),
        made if truncation else None,
    )


def noise(vocab: int, add: int, multiply: int) -> np.ndarray:
    x = np.arange(vocab, dtype=np.uint32) * np.uint32(multiply) + np.uint32(add)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x = x ^ (x >> np.uint32(16))
    uniform = (x >> np.uint32(9)).astype(np.float64) * 2.0**-23 + 2.0**-24
    return -np.log(-np.log(uniform))


def kept(logits: np.ndarray, asked: Asked, slack: float) -> np.ndarray:
    """``[V]`` bool: what truncation keeps; a positive ``slack`` keeps what is so near to a border, too."""
    scaled = (logits.astype(np.float32) / np.float32(max(asked.temperature, 1e-4))).astype(np.float64)
    shares = np.exp(scaled - scaled.max())
    order = np.argsort(-scaled, kind="stable")
    sorted_shares, sorted_scaled = shares[order], scaled[order]
    k = asked.top_k if 0 < asked.top_k < len(logits) else len(logits)
    keep = (np.arange(len(order)) < k) & (sorted_shares >= float(np.float32(asked.min_p)) * (1 - slack))
    counted = sorted_shares * ((np.arange(len(order)) < k) & (sorted_shares >= float(np.float32(asked.min_p))))
    total = counted.sum()
    before = np.cumsum(counted) - counted
    if asked.top_p < 1:
        keep &= before < float(np.float32(asked.top_p)) * total + slack * total
    keep[0] = True
    return scaled >= sorted_scaled[keep].min()


def fault(logits: np.ndarray, asked: Asked, token: int) -> str | None:
    """Why ``token`` is not what a row of finite (or -inf) ``logits [V]`` gives; None: it is."""
    if asked.temperature == 0:
        return None if token == int(np.argmax(logits)) else f"{token} is not {int(np.argmax(logits))}"
    if not 0 <= token < len(logits):
        return f"{token} is no token"
    scaled = (logits.astype(np.float32) / np.float32(max(asked.temperature, 1e-4))).astype(np.float64)
    noisy = scaled + noise(len(logits), asked.add, asked.multiply)
    certain, allowed = kept(logits, asked, -BORDER), kept(logits, asked, BORDER)
    best = noisy[certain].max()
    if not allowed[token]:
        return f"{token} is not kept"
    if noisy[token] < best - NEAR * max(1.0, abs(best)):
        return f"{token} has {noisy[token]}, there is {best}"
    return None


def as_read(logits: np.ndarray, dtype: mx.Dtype) -> tuple[mx.array, np.ndarray]:
    """``logits`` in ``dtype``, and what these are in float32."""
    array = mx.array(logits.astype(np.float32)).astype(dtype)
    return array, np.array(array.astype(mx.float32))
