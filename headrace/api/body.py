"""Request bodies: read within the limit, decoded within the depth, always a JSON object or a 4xx.

msgspec is strict where JSON is: it refuses NaN, Infinity, invalid UTF-8 and lone surrogates. What it cannot say
is where; for surrogates the standard library's lenient parser finds the field.
"""

from __future__ import annotations

import json
import re

import msgspec
from starlette.requests import ClientDisconnect, Request

from headrace.api.errors import BodyTooLarge, ClientGone, UnsupportedEncoding
from headrace.errors import InvalidRequest

MAX_DEPTH = 128
_SURROGATE = re.compile("[\ud800-\udfff]")


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body; ``BodyTooLarge`` as soon as it is known to be, ``ClientGone`` when it ends early."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedEncoding("Content-Encoding is not supported; send the body uncompressed")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise BodyTooLarge(f"the body has {declared} bytes; at most {limit_bytes} are accepted")
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit_bytes:
                raise BodyTooLarge(f"the body is longer than the {limit_bytes} bytes that are accepted")
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientGone from error
    return b"".join(chunks)


def decode_object(raw: bytes) -> dict[str, object]:
    """Decode a JSON object; fields whose value is null are left out (null means absent)."""
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise _too_deep() from None
    except msgspec.MsgspecError as error:
        raise _malformed(raw, str(error)) from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    # Every level opens a bracket, so few brackets prove a shallow body without a walk.
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _deeper_than(body, MAX_DEPTH):
        raise _too_deep()
    return {name: value for name, value in body.items() if value is not None}


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body is nested more than {MAX_DEPTH} levels deep")


def _deeper_than(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(child for child in item.values() if isinstance(child, dict | list))
            elif isinstance(item, list):
                below.extend(child for child in item if isinstance(child, dict | list))
        if not below:
            return False
        level = below
    return True


def _malformed(raw: bytes, reason: str) -> InvalidRequest:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})")
    if not text.strip():
        return InvalidRequest("the body is empty; a JSON object is expected")
    try:
        lenient = json.loads(text)
    except (ValueError, RecursionError):
        return InvalidRequest(f"the body is not valid JSON: {_plain_reason(reason)}")
    path = _find_surrogate(lenient, "")
    if path is not None:
        return InvalidRequest(f"{path} contains an unpaired surrogate, which is no character", param=path)
    return InvalidRequest("the body is not valid JSON: NaN, Infinity and numbers out of range are not accepted")


def _plain_reason(reason: str) -> str:
    return reason.removeprefix("JSON is malformed: ").lower()


def _find_surrogate(value: object, path: str) -> str | None:
    """Path of the first string (or name) with an unpaired surrogate."""
    if isinstance(value, str):
        return (path or "the body") if _SURROGATE.search(value) else None
    if isinstance(value, list):
        children = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        if any(_SURROGATE.search(name) for name in value):
            return path or "a field name"
        children = ((f"{path}.{name}" if path else name, item) for name, item in value.items())
    else:
        return None
    return next((found for name, item in children if (found := _find_surrogate(item, name))), None)
