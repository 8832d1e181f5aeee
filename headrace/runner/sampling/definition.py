"""What a sampled token may be, by the definition in float64 on the host: what sampling kernels are checked by.

A kernel may order two tokens the other way whose noisy logits are as near as float32's rounding, and may put the
border of top_p, top_k or min_p one token off where the mass there is. ``fault`` allows for these and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.runner.sampling.batch import RandomRows, Truncation

# Mass by which a border may be off, and noisy logits that count as equal.
BORDER = 1e-6
NEAR = 1e-5
LEAST_TEMPERATURE = 1e-4
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Asked:
    """A row's parameters; zeros, and a top_p of 1, are off. ``add`` and ``multiply``: the keys of its noise."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    add: int = 0x12345678
    multiply: int = 0x9E3779B1


def random_rows(asked: list[Asked], vocab: int, *, truncation: bool | None = None) -> RandomRows | None:
    """As ``build_sampling_batch`` gathers them; ``truncation`` None: there is one where a row asks for it."""
    chosen = [index for index, one in enumerate(asked) if one.temperature > 0]
    if not chosen:
        return None
    rows = [asked[index] for index in chosen]
    if truncation is None:
        truncation = any(one.top_k or one.top_p < 1 or one.min_p for one in rows)
    made = Truncation(
        np.array([_top_k(one, vocab) for one in rows], np.int32),
        np.array([one.top_p if one.top_p < 1 else 2.0 for one in rows], np.float32),
        np.array([one.min_p for one in rows], np.float32),
        bounded=False,
    )
    return RandomRows(
        None if len(chosen) == len(asked) else chosen,
        np.array([max(one.temperature, LEAST_TEMPERATURE) for one in rows], np.float32),
        np.array([one.add for one in rows], np.uint32),
        np.array([one.multiply for one in rows], np.uint32),
        made if truncation else None,
    )


def noise(vocab: int, add: int, multiply: int) -> Floats:
    """Gumbel noise ``[vocab]`` of a row's keys (see ``sampler.gumbel_argmax``)."""
    x = np.arange(vocab, dtype=np.uint32) * np.uint32(multiply) + np.uint32(add)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x = x ^ (x >> np.uint32(16))
    uniform = (x >> np.uint32(9)).astype(np.float64) * 2.0**-23 + 2.0**-24
    made: Floats = -np.log(-np.log(uniform))
    return made


def kept(logits: npt.NDArray[np.float32], asked: Asked, slack: float) -> npt.NDArray[np.bool_]:
    """``[V]``: what truncation keeps; a positive ``slack`` keeps what is so near to a border, too."""
    scaled = _scaled(logits, asked)
    shares = np.exp(scaled - scaled.max())
    order = np.argsort(-scaled, kind="stable")
    sorted_shares, sorted_scaled = shares[order], scaled[order]
    within = np.arange(len(order)) < _top_k(asked, len(logits))
    least = float(np.float32(asked.min_p))
    keep = within & (sorted_shares >= least * (1 - slack))
    counted = sorted_shares * (within & (sorted_shares >= least))
    total = counted.sum()
    if asked.top_p < 1:
        before = np.cumsum(counted) - counted
        keep &= before < float(np.float32(asked.top_p)) * total + slack * total
    keep[0] = True
    found: npt.NDArray[np.bool_] = scaled >= sorted_scaled[keep].min()
    return found


def fault(logits: npt.NDArray[np.float32], asked: Asked, token: int) -> str | None:
    """Why ``token`` is not what a row of finite (or -inf) ``logits [V]`` gives; None: it is."""
    if asked.temperature == 0:
        return None if token == int(np.argmax(logits)) else f"{token} is not {int(np.argmax(logits))}"
    if not 0 <= token < len(logits):
        return f"{token} is no token"
    noisy = _scaled(logits, asked) + noise(len(logits), asked.add, asked.multiply)
    certain, allowed = kept(logits, asked, -BORDER), kept(logits, asked, BORDER)
    best = noisy[certain].max()
    if not allowed[token]:
        return f"{token} is not kept"
    if noisy[token] < best - NEAR * max(1.0, abs(best)):
        return f"{token} has {noisy[token]}, there is {best}"
    return None


def _scaled(logits: npt.NDArray[np.float32], asked: Asked) -> Floats:
    """Over the temperature, divided in float32 as the sampler does."""
    temperature = np.float32(max(asked.temperature, LEAST_TEMPERATURE))
    made: Floats = (logits.astype(np.float32) / temperature).astype(np.float64)
    return made


def _top_k(asked: Asked, vocab: int) -> int:
    return asked.top_k if 0 < asked.top_k < vocab else vocab
