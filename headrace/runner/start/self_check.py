"""At load: find the way this model can be run over the pools, and prove it on the model itself.

A short prompt and a few decode steps of two rows go through a small pool, and every logit is compared with
mlx-lm's own one-sequence cache. The ways are tried from fast to general: handles (attention reads the pools),
materialized arrays, and materialized arrays one sequence at a time. A model that passes none is refused: a
wrong token is worse than no token. Where KV is packed, the way has to pass ``packed_check.py`` too; without the
decode kernel, if that is what fails there.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from headrace.errors import StartupError, one_line
from headrace.runner.attention.dispatch import install
from headrace.runner.forwards.logits_head import HeadSelector
from headrace.runner.kv.layout import ModelLayout
from headrace.runner.kv.store import Store
from headrace.runner.mlx_lm_adapter import one_sequence_cache
from headrace.runner.model_runner import RunnerOptions
from headrace.runner.start.packed_check import packed_fault
from headrace.runner.start.trial import TOLERANCE, Trial, difference, run_trial

log = logging.getLogger("headrace.runner")


def choose_options(
    model: nn.Module,
    selector: HeadSelector,
    found: ModelLayout,
    vocab_size: int,
    *,
    head_major: bool,
    wanted: RunnerOptions,
    store: Store | None = None,
) -> RunnerOptions:
    """The first of the ways to run ``model`` that gives its own logits.

    May unbind the decode kernel; the options then say so.

    Raises:
        StartupError: none does.
    """
    options = _choose(
        model, selector, found.unpacked(), vocab_size, head_major=head_major, wanted=wanted, store=store
    )
    if all(layer.bits is None for layer in found.layers):
        return options
    return _choose_packed(model, selector, found, vocab_size, head_major=head_major, chosen=options, store=store)


def _choose(
    model: nn.Module,
    selector: HeadSelector,
    found: ModelLayout,
    vocab_size: int,
    *,
    head_major: bool,
    wanted: RunnerOptions,
    store: Store | None,
) -> RunnerOptions:
    expected = [_reference(model, selector, prompt, steps) for prompt, steps in Trial.of(vocab_size).rows]
    faults: list[str] = []
    general = replace(wanted, materialize=True, compile=False, decode_kernel=False)
    untraced = [replace(wanted, trace_prompts=False)] if wanted.trace_prompts else []
    for options in (wanted, *untraced, general, replace(general, single_rows=True)):
        try:
            got = run_trial(model, selector, found, vocab_size, options, head_major=head_major, store=store).logits
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            faults.append(f"{type(error).__name__}: {one_line(error)}")
            continue
        worst = max(difference(a, b) for a, b in zip(expected, got, strict=True))
        if worst <= TOLERANCE.get(found.layers[0].dtype.size, 0.08):
            if faults:
                log.info("this model runs in a slower way; in a faster one: %s", "; ".join(faults))
            return options
        faults.append(f"logits differ by {worst:.3f} of their spread")
    raise StartupError(
        "this model cannot be run over a paged KV cache: its batched logits are not its own "
        f"({'; '.join(faults)}); use a model of another architecture"
    )


def _choose_packed(
    model: nn.Module,
    selector: HeadSelector,
    found: ModelLayout,
    vocab_size: int,
    *,
    head_major: bool,
    chosen: RunnerOptions,
    store: Store | None,
) -> RunnerOptions:
    """``chosen``, or a more general way in which packed KV is read rightly."""
    general = replace(chosen, materialize=True, compile=False, decode_kernel=False)
    ways = [chosen]
    if chosen.decode_kernel:
        ways.append(replace(chosen, decode_kernel=False, compile=chosen.compile and not head_major))
    ways += [way for way in (general, replace(general, single_rows=True)) if way not in ways]
    faults: list[str] = []
    for options in ways:
        if chosen.decode_kernel and not options.decode_kernel:
            install(None)
        fault = packed_fault(model, selector, found, vocab_size, options, head_major=head_major, store=store)
        if not fault:
            if faults:
                log.warning("packed KV is read in a slower way: %s", "; ".join(faults))
            return options
        faults.append(fault)
    bits = next(layer.bits for layer in found.layers if layer.bits is not None)
    raise StartupError(
        f"--kv-cache-dtype int{bits}: this model's packed KV is not read as it was stored "
        f"({'; '.join(faults)}); leave the flag out"
    )


def _reference(
    model: nn.Module, selector: HeadSelector, prompt: tuple[int, ...], steps: tuple[int, ...]
) -> mx.array:
    """Logits ``[1 + len(steps), V]`` after the prompt and after each step, from mlx-lm's own cache."""
    selector.all_positions()
    cache = one_sequence_cache(model)
    logits = [model(mx.array([prompt]), cache=cache)[0, -1]]
    logits += [model(mx.array([[token]]), cache=cache)[0, -1] for token in steps]
    return mx.stack(logits).astype(mx.float32)
