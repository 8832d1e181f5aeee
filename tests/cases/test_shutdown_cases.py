"""Draining: short streams finish, long ones end in words, new work is refused. Readiness: never too early."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import httpx
import pytest
from support.client import HANG_S, RawConnection, chat_body
from support.scripted import expected_text
from support.server import Serve, ServerRoom, await_ready

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_stream_that_can_finish_does_and_new_work_is_refused(start_server: Serve) -> None:
    server = start_server("plain")
    with server.client.streaming("<|s01|>", max_tokens=1500) as chunks:
        begun = list(islice(chunks, 10))
        server.process.send_signal(signal.SIGTERM)
        try:
            answer = server.client.chat("<|s05|>")
            while answer.status == 200:  # it came before the signal
                answer = server.client.chat("<|s05|>")
            assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
        except httpx.TransportError:
            pass
        text = "".join(c["delta"].get("content") or "" for chunk in [*begun, *chunks] for c in chunk["choices"])
    assert text == expected_text("s01", 1500)
    assert server.process.wait(timeout=30) == 0
    assert "Traceback" not in server.log()


def test_a_stream_that_cannot_finish_is_told_at_the_limit(start_server: Serve) -> None:
    server = start_server("plain", "--drain-timeout", "1", "--max-model-len", "8192")
    body = chat_body("m", "<|s01|>", max_tokens=100_000, stream=True)
    with RawConnection(server.port) as connection, RawConnection(server.port) as silent:
        connection.request("POST", "/v1/chat/completions", body)
        silent.request("POST", "/v1/chat/completions", body)
        connection.read_until(b"data: ", 10)
        server.process.send_signal(signal.SIGTERM)
        raw = connection.read_to_end()
    events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
    last = events[-1]
    ended = "error" in last or any(choice["finish_reason"] for choice in last.get("choices", []))
    assert ended or raw.rstrip().endswith(b"[DONE]\n\n\r\n0")
    assert server.process.wait(timeout=30) == 0
    assert "Traceback" not in server.log()


def test_the_first_green_light_is_true(server_room: ServerRoom) -> None:
    """Refused or 503 until the model answers; the control passes at the first 200."""
    port = free_port()
    process, log_path = server_room.launch(
        "plain", "--served-model-name", "m", "--port", str(port), "--kv-memory-mb", "64"
    )
    url = f"http://127.0.0.1:{port}"
    seen = set()
    try:
        deadline = time.monotonic() + HANG_S
        while 200 not in seen:
            assert time.monotonic() < deadline and process.poll() is None
            try:
                seen.add(httpx.get(f"{url}/health", trust_env=False, timeout=30).status_code)
            except httpx.TransportError:
                seen.add(0)
            if 200 not in seen:
                time.sleep(0.05)
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=chat_body("m", "<|s05|>"), trust_env=False, timeout=HANG_S
        )
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == "ABCDEFGH"
        assert seen <= {0, 503, 200}
        await_ready(process, "m", log_path).end()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=10)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_broken_model_is_never_ready(
    server_room: ServerRoom, scripted_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(scripted_folder("sharded"), tmp_path / "broken")
    (folder / "model-00002-of-00003.safetensors").unlink()
    port = free_port()
    seen: set[int] = set()
    over = threading.Event()

    def poll() -> None:
        while not over.is_set():
            try:
                seen.add(httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=30).status_code)
            except httpx.TransportError:
                time.sleep(0.02)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        ended = server_room.ends(str(folder), "--port", str(port))
    finally:
        over.set()
        poller.join()
    assert ended.code != 0 and 200 not in seen
