"""Stages of a recorded decode step, with a device that is played: recorded, compared, replayed, refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from headrace.runner.device_arrays import MARK_SHAPE
from headrace.runner.forwards import step_graphs
from headrace.runner.forwards.step_graphs import STEPS_TO_SETTLE, StepGraphs
from headrace.runner.kernels.recorder import Recorder
from headrace.runner.kv.input_batch import HostInts


def forward(tokens: mx.array, sent: Sequence[HostInts], marks: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
    """Logits ``[B, 3]`` that tell every input apart; there may be more tokens than rows."""
    offsets, tables = (ints.array for ints in sent)
    total = tokens[: len(offsets)] + 10 * offsets + 100 * mx.sum(tables, axis=1)
    return total[:, None] + mx.arange(3), [mark + 0 for mark in marks]


@dataclass
class PlayedGraph:
    """A recording; what a real one finds in the encoder is told by the test."""

    error: str = ""
    nodes: int = 7
    early: int = 5
    refusal: str = ""
    bound: list[tuple[int, ...]] = field(default_factory=list)

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def bind(
        self, tokens: mx.array, packed: mx.array, parts: list[mx.array], results: list[mx.array], zero: mx.array
    ) -> None:
        self.bound = [part.shape for part in parts]
        flat = mx.concatenate([part.reshape(-1) for part in parts])
        assert mx.array_equal(packed[: flat.size], flat)
        assert packed.size > flat.size and zero.shape == MARK_SHAPE

    def seconds(self, times: int) -> float:
        return 2.5


class PlayedReader:
    def read(self, arrays: list[mx.array]) -> bytes | None:
        data = b"".join(np.array(array).tobytes() for array in arrays)
        return data if len(data) < 1000 else None


class PlayedDevice:
    """Stands for the extension module: a replay computes the step from what it was sent."""

    Reader = PlayedReader

    def __init__(self, *, error: str = "", off_by: int = 0) -> None:
        self._error, self._off_by = error, off_by
        self.replays = 0

    def StepGraph(self, tag: str) -> PlayedGraph:
        return PlayedGraph(self._error)

    def mark(self, graph: PlayedGraph, arrays: list[mx.array]) -> mx.array:
        return mx.zeros((1,))

    def replay(
        self, graph: PlayedGraph, tokens: mx.array, message: bytes, after: list[mx.array]
    ) -> list[mx.array]:
        self.replays += 1
        words = np.frombuffer(message, np.int32)
        sent, start = [], 0
        for shape in graph.bound:
            size = int(np.prod(shape))
            sent.append(HostInts(words[start : start + size].reshape(shape)))
            start += size
        assert start == words.size
        return [forward(tokens, sent, [])[0] + self._off_by, mx.zeros(MARK_SHAPE, mx.int32)]


def run(graphs: StepGraphs, step: int, rows: int = 2, calls: list[int] | None = None) -> None:
    """One step, checked against the forward itself; ``calls`` counts how often that was built."""

    def counted(*given: Any) -> tuple[mx.array, list[mx.array]]:
        if calls is not None:
            calls.append(step)
        return forward(*given)

    rng = np.random.default_rng(step)
    values = [rng.integers(0, 50, shape).astype(np.int32) for shape in ((rows,), (rows, 4))]
    tokens = mx.array(rng.integers(0, 9, rows).astype(np.int32))
    marks = [mx.zeros(MARK_SHAPE, mx.int32)] * 2
    logits, after = graphs.run(counted, tokens, [HostInts(value) for value in values], marks)
    expected, _ = forward(tokens, [HostInts(value) for value in values], marks)
    assert mx.array_equal(logits.astype(mx.float32), expected.astype(mx.float32))
    assert len(after) == 2


def made(device: Any, limit: int = 1 << 30) -> StepGraphs:
    return StepGraphs(Recorder(device), limit)


def test_recorded_compared_then_replayed() -> None:
    device = PlayedDevice()
    graphs, calls = made(device), list[int]()
    for step in range(8):
        run(graphs, step, calls=calls)
    assert calls == list(range(STEPS_TO_SETTLE))
    assert graphs.replayed == 8 - STEPS_TO_SETTLE


def test_buckets_are_apart() -> None:
    graphs, calls = made(PlayedDevice()), list[int]()
    for step in range(8):
        run(graphs, step, rows=1 + step % 2, calls=calls)
    assert calls == list(range(8))
    run(graphs, 8, rows=1, calls=calls)
    assert graphs.replayed == 1


@pytest.mark.parametrize("device", [PlayedDevice(error="a node of another kind"), PlayedDevice(off_by=1)])
def test_what_is_wrong_is_never_used(device: PlayedDevice, caplog: pytest.LogCaptureFixture) -> None:
    graphs = made(device)
    for step in range(8):
        run(graphs, step)
    assert graphs.replayed == 0
    assert "not replayed" in caplog.text
    assert device.replays <= 1
    assert graphs.nbytes == 0


def play_memory(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """Every recording keeps ``kept`` bytes."""
    readings = iter(range(0, 100 * kept, kept))
    monkeypatch.setattr(step_graphs.mx, "get_active_memory", lambda: next(readings))


def settle(graphs: StepGraphs, rows: int) -> None:
    for step in range(STEPS_TO_SETTLE):
        run(graphs, step, rows=rows)


def test_the_longest_unused_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    play_memory(monkeypatch, 100)
    graphs = made(PlayedDevice(), limit=250)
    settle(graphs, 1)
    settle(graphs, 2)
    run(graphs, 9, rows=1)
    settle(graphs, 3)  # makes 300: the bucket of 2 rows goes
    assert graphs.nbytes == 200
    before = graphs.replayed
    run(graphs, 10, rows=1)
    run(graphs, 10, rows=3)
    assert graphs.replayed == before + 2
    run(graphs, 10, rows=2)
    assert graphs.replayed == before + 2


def test_one_that_alone_is_too_large_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    play_memory(monkeypatch, 300)
    graphs = made(PlayedDevice(), limit=250)
    for step in range(6):
        run(graphs, step)
    assert (graphs.replayed, graphs.nbytes) == (0, 0)
    assert "300 bytes, 250 are planned" in caplog.text


def test_cleared_ones_are_recorded_again() -> None:
    graphs, calls = made(PlayedDevice()), list[int]()
    for step in range(5):
        run(graphs, step, calls=calls)
    graphs.clear()
    run(graphs, 5, calls=calls)
    assert calls[-1] == 5


def test_reading_keeps_types_and_shapes() -> None:
    graphs = made(PlayedDevice())
    arrays = [mx.array([3, 4], mx.int32), mx.array([True, False]), mx.array([[0.5]], mx.float32)]
    for large in (arrays, [*arrays, mx.zeros((500,))]):
        found = graphs.read(large)
        assert [value.dtype for value in found[:3]] == [np.int32, np.bool_, np.float32]
        assert all(np.array_equal(value, np.array(array)) for value, array in zip(found, large, strict=True))


def test_device_seconds_and_their_absence() -> None:
    assert Recorder(PlayedDevice()).device_seconds(lambda: [mx.zeros(2)]) == 2.5  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no way"):
        Recorder(PlayedDevice(error="no way")).device_seconds(lambda: [mx.zeros(2)])  # type: ignore[arg-type]


def test_none_without_a_cuda_device() -> None:
    if mx.default_device() == mx.gpu:
        pytest.skip("a GPU is there")
    assert Recorder.for_device() is None
