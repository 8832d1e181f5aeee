"""The worker's mailbox over a real socket: order, bad messages, waiting."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zmq

from headrace.worker.mailbox import Mailbox
from headrace.worker.protocol import AbortRequest, Accepted, ClearPrefixCache, ToGateway, engine_identity


def test_messages_keep_their_order_and_a_bad_one_is_a_fault(tmp_path: Path) -> None:
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
        for message in wanted:
            router.send_multipart([identity, msgspec.msgpack.encode(message)])
        received: list[object] = []
        while len(received) < 3:
            received += mailbox.receive(5)
        assert received == wanted
        for payload in (b"\xc1 not msgpack", msgspec.msgpack.encode({"type": "No"})):
            router.send_multipart([identity, payload])
            with pytest.raises(msgspec.MsgspecError):
                mailbox.receive(5)
    finally:
        mailbox.close()
        router.close(0)
        context.term()
