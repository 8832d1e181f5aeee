"""The worker's mailbox over a real socket: order, bad messages, waiting."""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq

from headrace.worker.mailbox import Mailbox
from headrace.worker.protocol import AbortRequest, Accepted, ClearPrefixCache, ToGateway, engine_identity


def test_messages_keep_their_order_and_bad_ones_are_dropped(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = f"ipc://{tmp_path}/socket"
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    mailbox = Mailbox(context, endpoint, "token")
    try:
        assert mailbox.receive(0) == []
        mailbox.send(Accepted("a"))
        identity, data = router.recv_multipart()
        assert identity == engine_identity("token")
        assert msgspec.msgpack.decode(data, type=ToGateway) == Accepted("a")
        wanted = [AbortRequest("a"), ClearPrefixCache(), AbortRequest("b", 1)]
        for payload in (
            msgspec.msgpack.encode(wanted[0]),
            b"\xc1 not msgpack",
            msgspec.msgpack.encode({"type": "No"}),
        ):
            router.send_multipart([identity, payload])
        for message in wanted[1:]:
            router.send_multipart([identity, msgspec.msgpack.encode(message)])
        received: list[object] = []
        while len(received) < 3:
            received += mailbox.receive(5)
        assert received == wanted
    finally:
        mailbox.close()
        router.close(0)
        context.term()
