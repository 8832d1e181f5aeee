"""A stub peer for the benchmark's own test: lists a model, streams four words; every ``--fail``-th request fails.

usage: stub_peer.py PORT [FAIL_EVERY]
"""

from __future__ import annotations

import asyncio
import sys

from scripted_http import DONE, HEADERS, text_event, usage_event

served = 0


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    global served
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET"):
        body = b'{"data": [{"id": "stub"}]}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    elif (served := served + 1) % int([*sys.argv, "1000"][2]) == 0:
        writer.write(b"HTTP/1.1 503 busy\r\nContent-Length: 0\r\n\r\n")
    else:
        words = b"".join(text_event("word ", "length" if index == 3 else None) for index in range(4))
        writer.write(HEADERS + b"\r\n" + words + usage_event(9, 4) + DONE)
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(handle, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


asyncio.run(main())
