"""The check at load of the prefill kernel, with kernels made here in its place; and which forwards it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest

from headrace.runner.attention import paged_prefill, prefill_check
from headrace.runner.attention.dispatch import AttentionDispatcher
from headrace.runner.attention.kernel_check import LayerForm
from headrace.runner.attention.paged_prefill import Form, PagedPrefillKernel, refusal
from headrace.runner.attention.prefill_check import choose_prefill
from headrace.runner.attention.random_pools import random_prompts
from headrace.runner.attention.reference import paged_attention
from headrace.runner.kv.pool import LayerShape
from headrace.runner.kv.view import KVHandle, LayerView, PagedMask

LAYER = LayerShape(0, 2, 64, 64, mx.bfloat16)
FORM = LayerForm(LAYER, 4, None)


class ReferenceInItsPlace:
    """Computes what the kernel would, by the reference; notes the rows it is asked for."""

    def __init__(self, error: float = 0.0) -> None:
        self.error = error
        self.asked: list[tuple[tuple[int, ...], int | None, float]] = []

    def __call__(
        self,
        queries: mx.array,
        view: LayerView,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        softcap: float,
    ) -> mx.array:
        self.asked.append((tuple(view.batch.starts), window, softcap))
        return paged_attention(queries, view, scale, window, sinks, softcap) + self.error


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ReferenceInItsPlace:
    made = ReferenceInItsPlace()
    monkeypatch.setattr(PagedPrefillKernel, "for_device", staticmethod(lambda: made))
    monkeypatch.setattr(prefill_check, "CHECKED", (((0, 5, 33), (9, 7, 2)),))
    times = iter((1e-6, 2e-6) * 8)
    monkeypatch.setattr(prefill_check, "best_seconds", lambda run: next(times))
    return made


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_right_kernel_is_taken(kernel: ReferenceInItsPlace, bits: int | None) -> None:
    choice = choose_prefill({replace(FORM, layer=replace(LAYER, bits=bits)): 2}, 16)
    assert choice.kernel is kernel
    assert choice.note == "paged prefill kernel (256 tokens behind 1024: 1 us a layer, gathered 2)"


def test_a_wrong_one_is_not(kernel: ReferenceInItsPlace) -> None:
    kernel.error = 0.1
    choice = choose_prefill({FORM: 2, replace(FORM, window=16): 1}, 16)
    assert choice.kernel is None
    assert choice.note.startswith("prompts gathered: the prefill kernel's outputs differ by 0.")


def test_a_slower_one_is_not(kernel: ReferenceInItsPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((3e-6, 2e-6))
    monkeypatch.setattr(prefill_check, "best_seconds", lambda run: next(times))
    choice = choose_prefill({FORM: 1}, 16)
    assert choice.kernel is None and "faster here (256 tokens behind 1024: 3 us" in choice.note


def test_one_that_fails_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> PagedPrefillKernel:
        raise RuntimeError("no compiler\nmore")

    monkeypatch.setattr(PagedPrefillKernel, "for_device", staticmethod(refuses))
    assert choose_prefill({FORM: 1}, 16).note == "prompts gathered: the prefill kernel failed: no compiler"


def test_without_a_kernel_there_is_nothing_to_say() -> None:
    assert mx.default_device() == mx.gpu or choose_prefill({FORM: 1}, 16).note == ""


def test_forms_that_it_does_not_take_are_left_out(kernel: ReferenceInItsPlace) -> None:
    odd = replace(FORM, layer=replace(LAYER, key_dim=72))
    choice = choose_prefill({odd: 3, replace(FORM, window=24, softcap=50.0): 1}, 16)
    assert choice.kernel is kernel and {(window, cap) for _, window, cap in kernel.asked} == {(24, 50.0)}
    assert "key vectors of 72 elements" in choose_prefill({odd: 1}, 16).note


def test_what_the_kernel_takes() -> None:
    assert refusal(LAYER, 4, 16) is None
    for layer in (replace(LAYER, key_dim=256, value_dim=128), replace(LAYER, bits=4, dtype=mx.float16)):
        assert refusal(layer, 4, 32) is None
    for layer, heads, size in (
        (replace(LAYER, value_dim=40), 4, 16),
        (replace(LAYER, key_dim=272), 4, 16),
        (replace(LAYER, dtype=mx.float32), 4, 16),
        (LAYER, 3, 16),
        (LAYER, 4, 48),
        (LAYER, 4, 1),
    ):
        assert refusal(layer, heads, size) is not None


def view_of(
    starts: tuple[int, ...], lengths: tuple[int, ...], layer: LayerShape = LAYER, window: int | None = None
) -> tuple[mx.array, LayerView]:
    """As in a forward: the chunk's own keys and values are known."""
    queries, view = random_prompts(layer, 4, starts, lengths, 16, window)
    own = mx.zeros((len(starts), layer.kv_heads, max(lengths), layer.key_dim), layer.dtype)
    view.new = own, own
    return queries, view


def test_which_forwards_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    supports = PagedPrefillKernel.supports
    assert supports(*view_of((40, 0), (5, 9)))
    assert not supports(*view_of((0, 0), (5, 9)))  # planned before the first request
    assert supports(*view_of((0, 0), (5, 9), replace(LAYER, bits=8)))
    assert supports(*view_of((0,), (40,), window=16)) and not supports(*view_of((0,), (40,), window=64))
    assert not supports(*view_of((40,), (1,)))  # decode
    queries, view = view_of((40, 0), (5, 9))
    assert not supports(queries.astype(mx.float32), view)
    monkeypatch.setattr(paged_prefill, "MOST_PRODUCTS", 9 * 49 - 1)
    assert not supports(queries, view)


def test_the_dispatcher_asks_kernels_in_turn() -> None:
    class Kernel:
        def __init__(self, taken: Callable[[int], bool]) -> None:
            self.taken = taken

        def supports(self, queries: mx.array, view: LayerView) -> bool:
            return self.taken(queries.shape[2])

        def __call__(self, queries: mx.array, *_: object) -> mx.array:
            return mx.full(queries.shape, float(queries.shape[2]))

    dispatcher = AttentionDispatcher(Kernel(lambda n: n == 1), Kernel(lambda n: n > 3))  # type: ignore[arg-type]
    for length, own in ((1, True), (2, False), (4, True)):
        queries, view = random_prompts(LAYER, 4, (20,), (length,), 16, None)
        handle = KVHandle(view)
        out = dispatcher(queries, handle, handle, None, 0.125, PagedMask(None))
        assert bool(mx.all(out == float(length))) == own


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("tiles", [1, 2])
def test_two_blocks_share_a_multiprocessor(dim: int, bits: int | None, tiles: int) -> None:
    """Of 227 KB of shared memory; two tiles of rows are for widths up to 128."""
    layer = replace(LAYER, key_dim=dim, value_dim=dim, bits=bits)
    if tiles == 1 or dim <= 128:
        assert 2 * (Form(layer, 4, tiles, False).shared_bytes + 1024) <= 227 * 1024


def test_contexts_are_split_where_blocks_are_few() -> None:
    layer = LayerShape(0, 8, 128, 128, mx.bfloat16)

    def chosen(rows: int, length: int, context: int) -> tuple[int, int]:
        form, splits = paged_prefill._chosen(layer, 32, rows, length, context, has_softcap=False)
        return form.tiles, splits

    assert chosen(1, 2048, 4096) == (2, 1) and chosen(1, 512, 200) == (2, 1) and chosen(1, 8, 100) == (1, 1)
    assert chosen(8, 8, 2000) == (1, 1) and chosen(1, 8, 8200) == (1, 2) and chosen(1, 8, 70000) == (1, 16)
    assert chosen(8, 32, 70000) == (1, 2)  # blocks of the other rows keep the device busy, too
