"""Request bodies: read within the limit, decoded within the depth, always a JSON object or a 4xx.

msgspec is strict where JSON is: it refuses NaN, Infinity, invalid UTF-8 and lone surrogates. What it cannot say
is where; the standard library's lenient parser finds the field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

import msgspec
from starlette.requests import ClientDisconnect, Request

from headrace.api.errors import BodyTooLarge, ClientGone, UnsupportedEncoding
from headrace.errors import InvalidRequest

MAX_DEPTH = 128
_MOST_DIGITS = 4300  # of a whole number: Python reads no more
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
        lenient = json.loads(text, parse_int=_number)
    except (ValueError, RecursionError):
        return InvalidRequest(f"the body is not valid JSON: {_plain_reason(reason)}")
    if _deeper_than(lenient, MAX_DEPTH):
        return _too_deep()
    path = _find(lenient, "", _has_surrogate)
    if path is not None:
        where = path or "a field name"
        return InvalidRequest(f"{where} contains an unpaired surrogate, which is no character", param=path or None)
    path = _find(lenient, "", _is_no_number)
    if path:
        return InvalidRequest(f"{path} is NaN, infinite or out of range, which is not accepted", param=path)
    return InvalidRequest("the body is not valid JSON: NaN, Infinity and numbers out of range are not accepted")


def _plain_reason(reason: str) -> str:
    return reason.removeprefix("JSON is malformed: ").partition(" - at `")[0].lower()


def _number(digits: str) -> float:
    return int(digits) if len(digits) <= _MOST_DIGITS else math.inf


def _has_surrogate(value: object) -> bool:
    if isinstance(value, dict):
        return any(_SURROGATE.search(name) for name in value)
    return isinstance(value, str) and _SURROGATE.search(value) is not None


def _is_no_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _find(value: object, path: str, is_bad: Callable[[object], bool]) -> str | None:
    """Path of the first bad value; "" is the whole."""
    if is_bad(value):
        return path
    if isinstance(value, list):
        children = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        children = ((f"{path}.{name}" if path else name, item) for name, item in value.items())
    else:
        return None
    return next((found for at, item in children if (found := _find(item, at, is_bad)) is not None), None)
