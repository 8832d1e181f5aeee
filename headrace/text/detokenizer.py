"""Incremental detokenizer: token ids in, complete text out.

Every token stands for fixed bytes (``Tokenizer.token_bytes``); an incremental UTF-8 decoder turns the byte
stream into text. It keeps the at most three bytes of a character that is still coming, so a character split
over tokens appears once, whole, with its last token; each token costs O(1), however long the sequence is.
Bytes that can belong to no character become U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from headrace.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Text of one sequence as its tokens come. One object per sequence.

    Args:
        tokenizer: of the model.
        skip_special: leave out special tokens.
        kept: special tokens that are never left out.
        at_start: the tokens begin a text of their own. Vocabularies that put a space in front of every text
            then lose that space again. An answer continues its prompt, so there the space is kept.
    """

    __slots__ = ("_decoder", "_kept", "_skip_special", "_strip", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool = True,
        at_start: bool = False,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._kept = kept
        self._skip_special = skip_special
        self._decoder = _utf8_decoder("replace")
        self._strip = at_start and tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """Text that this token completes; "" while a character is still coming."""
        if self._skip_special and self._tokenizer.is_special(token_id) and token_id not in self._kept:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip and data:
            self._strip = False
            if not self._tokenizer.is_added(token_id):
                data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    @property
    def is_pending(self) -> bool:
        """Whether bytes of a character are waiting for more: an end would still add text to the newest token."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """The sequence ended: bytes of an unfinished character become one U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def decode_all(self, token_ids: Iterable[int]) -> str:
        """Push every token and flush."""
        return "".join([self.push(token_id) for token_id in token_ids]) + self.flush()
