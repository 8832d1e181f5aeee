"""The worker's end of the socket, and its heartbeat.

The main thread owns the mailbox's socket; the heartbeat thread owns a second one (ZeroMQ sockets are not
thread-safe, contexts are). While the engine has work the mailbox is drained without waiting; when it has none the
thread sleeps in ``poll`` and uses no CPU.
"""

from __future__ import annotations

import threading

import msgspec
import zmq

from headrace.worker.protocol import (
    EngineStats,
    Heartbeat,
    ToGateway,
    ToWorker,
    engine_identity,
    heartbeat_identity,
)

HEARTBEAT_INTERVAL_S = 0.5
_FLUSH_MS = 2000


def connect(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes) -> zmq.Socket[bytes]:
    """A DEALER towards the gateway's ROUTER; sending never blocks the caller (no high-water mark)."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, _FLUSH_MS)
    socket.connect(endpoint)
    return socket


class Mailbox:
    """Messages in and out of the engine loop. Main thread only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, token: str) -> None:
        self._socket = connect(context, endpoint, engine_identity(token))
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: ToGateway) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self, timeout_s: float | None) -> list[ToWorker]:
        """All messages that are there; waits up to ``timeout_s`` for the first (0: no wait; None: for ever).

        Raises ``msgspec.MsgspecError``: one cannot be read, so a request may be lost; the worker must not go on.
        """
        if not self._socket.poll(None if timeout_s is None else int(timeout_s * 1000)):
            return []
        messages: list[ToWorker] = []
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(data))

    def close(self) -> None:
        """Flush and close."""
        self._socket.close(_FLUSH_MS)


class HeartbeatThread(threading.Thread):
    """Sends the last stats twice a second, however long a step takes: life, as opposed to progress."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, token: str) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._context, self._endpoint, self._token = context, endpoint, token
        self._ended = threading.Event()
        self.stats = EngineStats()

    def run(self) -> None:
        socket = connect(self._context, self._endpoint, heartbeat_identity(self._token))
        while not self._ended.wait(HEARTBEAT_INTERVAL_S):
            socket.send(msgspec.msgpack.encode(Heartbeat(self.stats)))
        socket.close(0)

    def end(self) -> None:
        self._ended.set()
        self.join()
