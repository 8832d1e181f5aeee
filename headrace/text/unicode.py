"""Bytes and characters: what can be encoded, and the printable alphabet of byte-level vocabularies."""

from __future__ import annotations

from headrace.errors import InvalidRequest


def check_text(text: str, param: str) -> None:
    """Refuse text that is no valid Unicode (lone surrogates, as JSON escapes can spell them).

    Raises InvalidRequest that names ``param``.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidRequest(
            f"'{param}' holds an unpaired surrogate (U+{code:04X}) at character {error.start}", param=param
        ) from None


def byte_alphabet() -> dict[str, int]:
    """Character -> byte in byte-level BPE vocabularies (GPT-2's scheme).

    Printable Latin-1 bytes stand for themselves; the other 68 are numbered upwards from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    shifted = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(shifted)})
    return alphabet
