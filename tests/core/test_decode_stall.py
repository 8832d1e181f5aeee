"""The bound on stalls on simulated devices: cold, behind large chunks, with noise, with more than the formula."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from fake_runner import Engine, layout, request

from headrace.core.prefill_budget import MIN_CHUNK_TOKENS, QUIET_STEP_S, QUIET_TOKENS
from headrace.core.scheduler import SchedulerConfig
from headrace.core.step import SchedulerOutput

STALL_S = 0.25


@dataclass(frozen=True)
class Device:
    """Seconds: a decode forward; each prefill forward; a prompt token; and per token of context, a prompt token's
    attention, and what a forward does once for its context (a gather, say)."""

    decode_s: float
    launch_s: float
    token_s: float
    attention_s: float
    gather_s: float
    noise: float = 0.0

    def step_s(self, output: SchedulerOutput) -> float:
        seconds = self.decode_s if output.decode else 0.0
        for row in output.prefill:
            context = row.start + row.num_tokens / 2
            seconds += self.launch_s + row.start * self.gather_s
            seconds += row.num_tokens * (self.token_s + context * self.attention_s)
        return seconds * (1 + self.noise * (random.Random(output.step_id).random() * 2 - 1))


DEVICES = {
    "gpu": Device(6e-3, 6e-3, 4e-5, 4e-9, 0.0),
    "small gpu": Device(30e-3, 20e-3, 1e-3, 1e-7, 1e-6, noise=0.1),
    "cpu": Device(50e-3, 5e-3, 2e-3, 5e-7, 5e-6, noise=0.15),
    "slow attention": Device(20e-3, 0.0, 2e-4, 5e-7, 0.0, noise=0.1),
}


class Run:
    """Streams on a device and a long prompt that comes later; times of the steps in which both were."""

    def __init__(self, device: Device, *, warm: bool, prompt: int = 6000) -> None:
        config = SchedulerConfig(max_model_len=16_000, max_decode_stall_ms=1000 * STALL_S)
        self.engine = Engine(config, layout(16, None), (4000,))
        self.engine.runner.cost_s = device.step_s
        self.engine.runner.read_context = lambda row: 0  # type: ignore[method-assign]  # checked elsewhere
        self.stalls: list[float] = []
        self.sizes: list[int] = []
        if warm:
            self.engine.add(request("before", [7] * 5000, 1))
            self.engine.run()
        for i in range(4):
            self.engine.add(request(f"stream {i}", [i + 1] * 12, 15_000))
        for _ in range(10):
            self.engine.step()
        self.engine.add(request("long", [9] * prompt, 2))
        while self.engine.received["long", 0].first is None:
            output = self.engine.step()
            if output.prefill:
                self.stalls.append(device.step_s(output))
                self.sizes.append(sum(row.num_tokens for row in output.prefill))


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_no_step_is_longer_than_the_bound_and_a_decode_step(device: Device, warm: bool) -> None:
    run = Run(device, warm=warm)
    for stall_s, size in zip(run.stalls, run.sizes, strict=True):
        assert size <= MIN_CHUNK_TOKENS or stall_s <= STALL_S + device.decode_s, (stall_s, size)
    assert sum(run.sizes) == 6000


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_the_bound_is_used(device: Device) -> None:
    run = Run(device, warm=True)
    later = [stall_s for stall_s, size in zip(run.stalls, run.sizes, strict=True) if size < 2048][5:]
    assert sum(later) / max(1, len(later)) > 0.6 * STALL_S or not later


def test_one_slow_step_shrinks_the_next_chunks_and_is_forgotten() -> None:
    device = DEVICES["small gpu"]
    run = Run(device, warm=True, prompt=14_000)
    assert max(run.sizes[40:]) > 0.7 * max(run.sizes)


def test_a_bound_of_zero_is_no_bound() -> None:
    config = SchedulerConfig(max_model_len=16_000, max_decode_stall_ms=0)
    engine = Engine(config, layout(16, None), (4000,))
    engine.add(request("stream", [1] * 12, 100))
    for _ in range(4):
        engine.step()
    engine.add(request("long", [9] * 1500, 1))
    assert [row.num_tokens for row in engine.step().prefill] == [1500]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_newcomer_waits_for_no_long_chunk(device: Device) -> None:
    """A long prompt is under way and nobody streams: chunks end within about a second, or are small."""
    config = SchedulerConfig(
        max_model_len=16_000, max_decode_stall_ms=1000 * STALL_S, prefill_token_s=device.token_s
    )
    engine = Engine(config, layout(16, None), (4000,))
    engine.runner.cost_s = device.step_s
    engine.runner.read_context = lambda row: 0  # type: ignore[method-assign]  # checked elsewhere
    engine.add(request("long", [9] * 12_000, 1))
    chunks = []
    while engine.scheduler.has_work():
        output = engine.step()
        if output.prefill:
            chunks.append((sum(row.num_tokens for row in output.prefill), device.step_s(output)))
    assert sum(size for size, _ in chunks) == 12_000
    for size, seconds in chunks[4:]:  # what attention costs is learnt from the first ones
        assert size <= QUIET_TOKENS or seconds <= 1.4 * QUIET_STEP_S, (size, seconds)
    assert max(seconds for _, seconds in chunks) > 0.5 * QUIET_STEP_S or chunks[0][0] == 2048
