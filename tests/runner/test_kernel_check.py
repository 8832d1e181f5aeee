"""The check at load of the decode kernel, with kernels made here in its place."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from headrace.core.layout import KVLayout, LayerGroup
from headrace.runner.attention import kernel_check
from headrace.runner.attention.kernel_check import choose_kernel, choose_model_kernel
from headrace.runner.attention.paged_decode import PagedDecodeKernel
from headrace.runner.attention.reference import paged_attention
from headrace.runner.kv.layout import ModelLayout
from headrace.runner.kv.pool import LayerShape
from headrace.runner.kv.view import LayerView

LAYER = LayerShape(0, 2, 64, 64, mx.bfloat16)


class ReferenceInItsPlace:
    """Computes what the kernel would, by the reference; notes the forms it is asked for."""

    def __init__(self, error: float = 0.0) -> None:
        self.error = error
        self.asked: set[tuple[int, int, int | None, int | None, float]] = set()

    def __call__(
        self,
        queries: mx.array,
        view: LayerView,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        softcap: float,
    ) -> mx.array:
        layer = view.pool.layers[0]
        self.asked.add((layer.key_dim, layer.value_dim, layer.bits, window, softcap))
        return paged_attention(queries, view, scale, window, sinks, softcap) + self.error


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ReferenceInItsPlace:
    made = ReferenceInItsPlace()
    monkeypatch.setattr(PagedDecodeKernel, "for_device", staticmethod(lambda: made))
    times = iter((1e-6, 2e-6) * 8)
    monkeypatch.setattr(kernel_check, "best_seconds", lambda run: (run(), next(times))[1])
    return made


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("widths", [(64, 64), (80, 80), (96, 64)])
def test_a_right_and_faster_kernel_is_taken(
    kernel: ReferenceInItsPlace, bits: int | None, widths: tuple[int, int]
) -> None:
    choice = choose_kernel(replace(LAYER, key_dim=widths[0], value_dim=widths[1], bits=bits), 4, None, 16)
    assert choice.kernel is kernel
    assert choice.note.startswith("paged decode kernel (1 us a layer, reference 2; 4 heads over 2 of")


def test_a_wrong_one_is_not(kernel: ReferenceInItsPlace) -> None:
    kernel.error = 0.1
    choice = choose_kernel(replace(LAYER, bits=8), 4, None, 16)
    assert choice.kernel is None
    assert "outputs differ by 0.1" in choice.note
    assert "4 heads over 2 of 64, int8" in choice.note


def test_without_tensor_cores_where_those_are_wrong(
    kernel: ReferenceInItsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*, tiles: bool = True) -> ReferenceInItsPlace:
        return ReferenceInItsPlace(0.1) if tiles else kernel

    monkeypatch.setattr(PagedDecodeKernel, "for_device", staticmethod(made))
    assert choose_kernel(replace(LAYER, bits=8), 4, None, 16).kernel is kernel
    assert choose_kernel(replace(LAYER, bits=8, key_dim=96), 4, None, 16).kernel is None
    assert choose_kernel(LAYER, 4, None, 16).kernel is kernel
    assert choose_kernel(replace(LAYER, dtype=mx.float32), 4, None, 16).kernel is None


@pytest.mark.parametrize("slower", [False, True])
def test_the_quicker_of_two_right_ones(
    kernel: ReferenceInItsPlace, slower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_tiles = ReferenceInItsPlace()
    monkeypatch.setattr(
        PagedDecodeKernel, "for_device", staticmethod(lambda *, tiles=True: by_tiles if tiles else kernel)
    )
    monkeypatch.setattr(kernel_check, "no_slower", lambda new, old: (new(), old(), not slower)[2])
    assert choose_kernel(LAYER, 4, None, 16).kernel is (kernel if slower else by_tiles)


def test_another_one_that_fails_is_said(
    kernel: ReferenceInItsPlace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no better than the right one, which serves; nothing is kept quiet."""
    by_tiles = ReferenceInItsPlace()

    def made(*, tiles: bool = True) -> ReferenceInItsPlace:
        if not tiles:
            raise RuntimeError("no room for it\nat address 7")
        return by_tiles

    monkeypatch.setattr(PagedDecodeKernel, "for_device", made)
    monkeypatch.setattr(kernel_check, "takes_tiles", lambda layer, block_size: True)
    assert choose_kernel(LAYER, 4, None, 16).kernel is by_tiles
    assert caplog.messages[-1].endswith("beside another kernel, no room for it")


def test_a_slower_one_is_not(kernel: ReferenceInItsPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((3e-6, 2e-6))
    monkeypatch.setattr(kernel_check, "best_seconds", lambda run: next(times))
    choice = choose_kernel(LAYER, 4, None, 16)
    assert choice.kernel is None
    assert "faster here (2 against 3 us a layer" in choice.note


def test_one_that_fails_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> PagedDecodeKernel:
        raise RuntimeError("no compiler\nmore")

    monkeypatch.setattr(PagedDecodeKernel, "for_device", staticmethod(refuses))
    assert choose_kernel(LAYER, 4, None, 16).note == "reference attention: the kernel failed: no compiler"


def test_shapes_that_it_does_not_take_are_named(kernel: ReferenceInItsPlace) -> None:
    assert "key vectors of 20 elements" in choose_kernel(replace(LAYER, key_dim=20), 4, None, 16).note
    assert "3 query heads cannot share 2" in choose_kernel(LAYER, 3, None, 16).note


def test_every_form_of_a_model_is_checked(kernel: ReferenceInItsPlace) -> None:
    wide = replace(LAYER, group=1, key_dim=96, value_dim=96, bits=4)
    without = LayerShape(1, 1, 1, 1, mx.float32)
    groups = (LayerGroup("full", 2, 1, None), LayerGroup("sliding_24", 3, 1, 24))
    found = ModelLayout((LAYER, wide, LAYER, without, wide), KVLayout(16, groups))
    choice = choose_model_kernel(found, 4, 50.0)
    assert choice.kernel is kernel
    assert kernel.asked == {(64, 64, None, None, 50.0), (96, 96, 4, 24, 50.0)}
    assert "4 heads over 2 of 64, capped at 50; 4 heads over 2 of 96, int4, window 24, capped at 50" in choice.note
