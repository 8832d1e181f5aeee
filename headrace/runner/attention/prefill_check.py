"""At start on CUDA: is the prefill kernel right here, and no slower than gathering what it reads in place?

Every distinct form that the model's layers will use runs over random pools: rows with prefixes of different
lengths through shuffled block tables, chunks short and long, contexts split and not. As with decode
(``kernel_check.py``) the kernel is used when its outputs match those of attention by other means; otherwise
prompts go on being gathered, and the reason is logged and shown. It is timed where the other way has been planned
already, so at its worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from headrace.errors import one_line
from headrace.runner.attention.kernel_check import LayerForm
from headrace.runner.attention.paged_prefill import MIN_SPLIT, PagedPrefillKernel, refusal
from headrace.runner.attention.random_pools import float32_view, random_prompts
from headrace.runner.attention.reference import paged_attention
from headrace.runner.kernels.language import compile_ahead
from headrace.runner.timing import best_seconds

# Largest difference of an output of unit scale.
TOLERANCE = 3e-2
# Starts and lengths of the rows of a forward. Both sizes of tiles run, and contexts that are split.
CHECKED: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((0, 5, 333, 1000), (40, 7, 33, 2)),
    ((2 * MIN_SPLIT,), (24,)),
    ((700, 64), (300, 170)),
)
TIMED = ((1024,), (256,))
# How much longer it may take: gathering plans tens of milliseconds for each length that it has not seen.
SLOWER = 1.25


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """The kernel to use, or None: prompts are gathered; ``note`` says which and why."""

    kernel: PagedPrefillKernel | None
    note: str


def choose_prefill(forms: Mapping[LayerForm, int], block_size: int) -> PrefillChoice:
    """Check and time the device's kernel; ``forms``: how many layers of a model have each."""
    form = None
    if not forms:
        return PrefillChoice(None, "")
    try:
        kernel = PagedPrefillKernel.for_device()
        if kernel is None:
            return PrefillChoice(None, "")
        taken = {form: count for form, count in forms.items() if _refusal(form, block_size) is None}
        if not taken:
            return PrefillChoice(None, f"prompts gathered: {_refusal(next(iter(forms)), block_size)}")
        compile_ahead(partial(_called, kernel, taken, block_size))
        own = gathered = 0.0
        for form, count in taken.items():
            wrong = _fault(kernel, form, block_size)
            if wrong is not None:
                return PrefillChoice(None, f"prompts gathered: {wrong}")
            times = _times(kernel, form, block_size)
            own, gathered = own + count * times[0], gathered + count * times[1]
    except Exception as error:
        # Whatever a compiler or driver says about a kernel, gathering can serve.
        what = one_line(error)
        where = "" if form is None else f" ({form})"
        return PrefillChoice(None, f"prompts gathered: the prefill kernel failed: {what}{where}")
    layers = sum(taken.values())
    own, gathered = own / layers * 1e6, gathered / layers * 1e6
    what = f"{TIMED[1][0]} tokens behind {TIMED[0][0]}: {own:.0f} us a layer, gathered {gathered:.0f}"
    if own > SLOWER * gathered:
        return PrefillChoice(None, f"prompts gathered: faster here ({what})")
    return PrefillChoice(kernel, f"paged prefill kernel ({what})")


def _refusal(form: LayerForm, block_size: int) -> str | None:
    return refusal(form.layer, form.heads, block_size)


def _fault(kernel: PagedPrefillKernel, form: LayerForm, block_size: int) -> str | None:
    """Why the kernel cannot serve ``form``; None: it is right."""
    for starts, lengths in CHECKED:
        queries, view = random_prompts(form.layer, form.heads, starts, lengths, block_size, form.window)
        options = (form.layer.key_dim**-0.5, form.window, None, form.softcap)
        expected = paged_attention(queries.astype(mx.float32), float32_view(view), *options)
        got = kernel(queries, view, *options).astype(mx.float32)
        for row, count in enumerate(lengths):
            worst = float(np.array(mx.max(mx.abs(expected[row, :, :count] - got[row, :, :count]))))
            if not worst <= TOLERANCE:
                return f"the prefill kernel's outputs differ by {worst:.3g} here ({form})"
    return None


def _called(kernel: PagedPrefillKernel, forms: Iterable[LayerForm], block_size: int) -> None:
    """Call the kernels that the check will run, without evaluating anything."""
    for form in forms:
        for starts, lengths in (*CHECKED, TIMED):
            queries, view = random_prompts(form.layer, form.heads, starts, lengths, block_size, form.window)
            kernel(queries, view, form.layer.key_dim**-0.5, form.window, None, form.softcap)


def _times(kernel: PagedPrefillKernel, form: LayerForm, block_size: int) -> tuple[float, float]:
    """Seconds of the kernel and of gathering."""
    queries, view = random_prompts(form.layer, form.heads, *TIMED, block_size, form.window)
    options = (form.layer.key_dim**-0.5, form.window, None, form.softcap)
    return (
        best_seconds(lambda: kernel(queries, view, *options)),
        best_seconds(lambda: paged_attention(queries, view, *options)),
    )
