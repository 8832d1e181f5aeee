"""At start on a device: is the decode kernel right here, and is it faster than the reference?

Every distinct form that the model's layers will use (packed or not, widths, window) runs over random pools, rows
of different lengths through shuffled block tables. The kernel is used when its outputs match the reference's and
it takes less time over all layers; otherwise the reference is, and the reason is logged and shown. Kernels only
read, so a wrong one harms nothing before it is found.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np

from headrace.errors import one_line
from headrace.runner.attention.paged_decode import PagedDecodeKernel, blocks_per_row, refusal, takes_tiles
from headrace.runner.attention.random_pools import float32_view, random_case
from headrace.runner.attention.reference import paged_attention
from headrace.runner.kernels.language import compile_ahead
from headrace.runner.kv.layout import ModelLayout
from headrace.runner.kv.pool import LayerShape
from headrace.runner.kv.view import LayerView
from headrace.runner.timing import best_seconds, no_slower

log = logging.getLogger("headrace.runner")

# Largest difference of an output of unit scale, by bytes of the dtype.
TOLERANCE = {4: 2e-3, 2: 3e-2}
# Thread blocks of the batches that are checked.
CHECKED_BLOCKS = (1, 200, 400)
# Rows over which two kernels are compared: so much to read that the device takes longer than the host.
LOADED_BYTES = 64 << 20
LOADED_CONTEXT = 512
MAX_LOADED_ROWS = 64


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel to use, or None for the reference; ``note`` says which and why."""

    kernel: PagedDecodeKernel | None
    note: str


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What makes one layer's attention differ from another's."""

    layer: LayerShape
    heads: int
    window: int | None
    softcap: float = 0.0

    def __str__(self) -> str:
        layer = self.layer
        widths = f"{layer.key_dim}" if layer.key_dim == layer.value_dim else f"{layer.key_dim}/{layer.value_dim}"
        packed = "" if layer.bits is None else f", int{layer.bits}"
        window = "" if self.window is None else f", window {self.window}"
        softcap = f", capped at {self.softcap:g}" if self.softcap else ""
        return f"{self.heads} heads over {layer.kv_heads} of {widths}{packed}{window}{softcap}"


def choose_kernel(layer: LayerShape, heads: int, window: int | None, block_size: int) -> KernelChoice:
    """Check and time the device's kernel on one layer's shape with ``heads`` query heads."""
    return _choose({LayerForm(replace(layer, group=0), heads, window): 1}, block_size)


def choose_model_kernel(found: ModelLayout, heads: int, softcap: float = 0.0) -> KernelChoice:
    """The same over all layers of a model."""
    return _choose(model_forms(found, heads, softcap), found.layout.block_size)


def model_forms(found: ModelLayout, heads: int, softcap: float) -> Counter[LayerForm]:
    """How many layers of a model have each form; those without KV of their own are left out."""
    windows = [group.window for group in found.layout.groups]
    return Counter(
        LayerForm(replace(layer, group=0), max(heads, layer.kv_heads), windows[layer.group], softcap)
        for layer in found.layers
        if layer.key_dim > 1
    )


def _choose(forms: Mapping[LayerForm, int], block_size: int) -> KernelChoice:
    """``forms``: how many layers have each."""
    choice = _judged(PagedDecodeKernel.for_device, forms, block_size)
    tiled = [form for form in forms if takes_tiles(form.layer, block_size)]
    if mx.metal.is_available() or not tiled:
        return choice
    plain = partial(PagedDecodeKernel.for_device, tiles=False)
    if choice.kernel is not None and not _loses(choice.kernel, plain, tiled, block_size):
        return choice
    # Tensor cores read pools wrongly here, or slowly: without them another kernel does.
    other = _judged(plain, forms, block_size)
    return choice if other.kernel is None else other


def _loses(
    kernel: PagedDecodeKernel,
    make: Callable[[], PagedDecodeKernel | None],
    forms: Iterable[LayerForm],
    block_size: int,
) -> bool:
    """Whether the kernel takes longer than another in some form, over pools that keep the device busy."""
    try:
        other = make()
        cases = [(form, _loaded_case(form, block_size)) for form in forms]

        def run(by: PagedDecodeKernel | None, form: LayerForm, case: tuple[mx.array, LayerView]) -> mx.array:
            assert by is not None
            return by(*case, form.layer.key_dim**-0.5, form.window, None, form.softcap)

        compile_ahead(lambda: [run(by, *case) for by in (kernel, other) for case in cases])
        return not all(no_slower(partial(run, kernel, *case), partial(run, other, *case)) for case in cases)
    except Exception as error:
        log.warning("attention by tensor cores is used untimed: beside another kernel, %s", one_line(error))
        return False  # another kernel that fails is no better


def _loaded_case(form: LayerForm, block_size: int) -> tuple[mx.array, LayerView]:
    rows = max(1, min(MAX_LOADED_ROWS, LOADED_BYTES // (LOADED_CONTEXT * form.layer.bytes_per_token)))
    return random_case(form.layer, form.heads, [LOADED_CONTEXT] * rows, block_size, form.window)


def _judged(
    make: Callable[[], PagedDecodeKernel | None], forms: Mapping[LayerForm, int], block_size: int
) -> KernelChoice:
    form = None
    try:
        kernel = make()
        if kernel is None:
            return KernelChoice(None, "reference attention: no kernel for this device")
        compile_ahead(partial(_called, kernel, forms, block_size))
        own = reference = 0.0
        for form, count in forms.items():
            wrong = _fault(kernel, form, block_size)
            if wrong is not None:
                return KernelChoice(None, f"reference attention: {wrong}")
            times = _times(kernel, form, block_size)
            own, reference = own + count * times[0], reference + count * times[1]
    except Exception as error:
        # Whatever a compiler or driver says about a kernel, the reference can serve.
        what = one_line(error)
        where = "" if form is None else f" ({form})"
        return KernelChoice(None, f"reference attention: the kernel failed: {what}{where}")
    layers = sum(forms.values())
    own, reference = own / layers * 1e6, reference / layers * 1e6
    described = "; ".join(str(form) for form in forms)
    if own > reference:
        return KernelChoice(
            None, f"reference attention: faster here ({reference:.0f} against {own:.0f} us a layer; {described})"
        )
    return KernelChoice(
        kernel, f"paged decode kernel ({own:.0f} us a layer, reference {reference:.0f}; {described})"
    )


def _fault(kernel: PagedDecodeKernel, form: LayerForm, block_size: int) -> str | None:
    """Why the kernel cannot serve ``form``: it does not take it, or it is wrong here."""
    layer = form.layer
    reason = refusal(layer)
    if reason is not None:
        return reason
    if form.heads % layer.kv_heads:
        return f"{form.heads} query heads cannot share {layer.kv_heads} KV heads evenly"
    for lengths in _checked_lengths(form, block_size):
        queries, view = random_case(layer, form.heads, lengths, block_size, form.window)
        scale = layer.key_dim**-0.5
        options = (scale, form.window, None, form.softcap)
        expected = paged_attention(queries.astype(mx.float32), float32_view(view), *options)
        got = kernel(queries, view, *options).astype(mx.float32)
        worst = float(np.array(mx.max(mx.abs(expected - got))))
        if not worst <= TOLERANCE.get(layer.dtype.size, 3e-2):
            return f"the kernel's outputs differ by {worst:.3g} here ({form})"
    return None


def _checked_lengths(form: LayerForm, block_size: int) -> list[list[int]]:
    """Batches that bring every compiled form: few rows split the context, more are whole, by ever fewer warps."""
    mixed = [1, block_size, block_size + 1, 5 * block_size - 3, 2100, 33, 700, 1]
    counts = sorted({max(3, blocks // blocks_per_row(form.layer, form.heads)) for blocks in CHECKED_BLOCKS})
    return [mixed, [5, 500, 100], *([1 + 37 * row % 211 for row in range(rows)] for rows in counts)]


def _called(kernel: PagedDecodeKernel, forms: Iterable[LayerForm], block_size: int) -> None:
    """Call the kernels that the check will run, without evaluating anything."""
    for form in forms:
        for lengths in _checked_lengths(form, block_size):
            queries, view = random_case(form.layer, form.heads, lengths, block_size, form.window)
            kernel(queries, view, form.layer.key_dim**-0.5, form.window, None, form.softcap)


def _times(kernel: PagedDecodeKernel, form: LayerForm, block_size: int) -> tuple[float, float]:
    """Seconds of the kernel and of the reference."""
    lengths = [1, 200, 350, 640, 900, 33, 700, 1]
    queries, view = random_case(form.layer, form.heads, lengths, block_size, form.window)
    options = (form.layer.key_dim**-0.5, form.window, None, form.softcap)
    return (
        best_seconds(lambda: kernel(queries, view, *options)),
        best_seconds(lambda: paged_attention(queries, view, *options)),
    )
