"""Text to token ids and back, for one model.

The work is done by the ``tokenizers`` library. Three views of one vocabulary (they share it, so the extra ones
cost nothing) differ in what special tokens' text means:

    parsing: the text of a special token is that token         (templates, raw completions)
    plain:   it is ordinary text                                (what users wrote)
    inner:   the same, for text in the middle of a prompt: vocabularies that put a space in front of every
             text do not put one there

Added tokens that are not special are tokens in all three. Decoding is ours: every token stands for fixed
bytes, so any cut of a token sequence decodes to the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from headrace.errors import InvalidRequest
from headrace.text.special_text import SpecialText
from headrace.text.unicode import byte_alphabet, check_text

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's visible space
# What tokens with "lstrip" or "rstrip" swallow: Unicode's White_Space property.
_WHITESPACE = (
    "".join(map(chr, [*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029]))
    + "\u202f\u205f\u3000"
)
# Begins the names of entries that stand for nothing: a vocabulary needs distinct names, files have empty ones.
NAMELESS = "\0nameless "


class Tokenizer:
    """Tokenizer of one model; safe to use from several threads.

    Args:
        backend: loaded, with all added tokens.
        named: the tokens that have a role, by Hugging Face's names (``bos_token``, ``eos_token`` …) -> text.
        add_bos: whether a raw prompt begins with the beginning-of-sequence token; None: as the backend's
            own post-processor does it.

    Attributes:
        vocab_size: one more than the highest token id.
        bos_id, eos_id: None when the model declares none.
        adds_bos: what ``encode(add_bos=None)`` does.
        closing_ids: what the backend's own post-processor puts behind a text (embedding models want it).
        named: see above.
        special: texts of the special tokens.
        special_ids: their ids.
        strips_leading_space: a text's encoding begins with a space that is not in the text.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, named: Mapping[str, str], add_bos: bool | None = None
    ) -> None:
        added = backend.get_added_tokens_decoder()
        self.named = dict(named)
        self.bos_id = _token_id(backend, named.get("bos_token"))
        self.eos_id = _token_id(backend, named.get("eos_token"))
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special = SpecialText({added[token_id].content: token_id for token_id in self.special_ids})
        self.vocab_size = 1 + max(
            backend.get_vocab_size(with_added_tokens=True) - 1, max(backend.get_vocab().values(), default=-1)
        )
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._strips_left = frozenset(i for i in self.special_ids if added[i].lstrip)
        self._strips_right = frozenset(i for i in self.special_ids if added[i].rstrip)
        self._parsing = backend
        self._plain = _view(backend, inner=False)
        self._inner = _view(backend, inner=True)
        self.adds_bos = _default_bos(backend, self.bos_id) if add_bos is None else add_bos
        self.closing_ids = _closing_ids(backend)

        decoder = _state(backend.decoder)
        self.strips_leading_space = _strips_leading_space(decoder)
        self._byte_level = _mentions(decoder, "ByteLevel") or _mentions(_state(backend.pre_tokenizer), "ByteLevel")
        self._byte_fallback = _mentions(decoder, "ByteFallback") or _mentions(decoder, "Metaspace")
        self._alphabet = byte_alphabet()
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    # -- encoding --------------------------------------------------------------------------------------

    def encode(
        self, text: str, *, parse_special: bool, add_bos: bool | None = None, param: str = "prompt"
    ) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: any valid Unicode.
            parse_special: whether text such as ``<|im_end|>`` becomes the control token.
            add_bos: put the beginning-of-sequence token first unless it is there already; None: ``adds_bos``.
            param: the request field to name in an error.

        Raises InvalidRequest for unpaired surrogates.
        """
        check_text(text, param)
        ids = _ids(self._parsing if parse_special else self._plain, text)
        wanted = self.adds_bos if add_bos is None else add_bos
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Token ids of plain text (never parsed) with special tokens, given as ids, between it.

        Equals ``encode(parse_special=True)`` of the joined text where that text spells no special token.
        """
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
                continue
            if index and parts[index - 1] in self._strips_right:
                part = part.lstrip(_WHITESPACE)
            if index + 1 < len(parts) and parts[index + 1] in self._strips_left:
                part = part.rstrip(_WHITESPACE)
            if part:
                ids += _ids(self._inner if index else self._plain, part)
        return ids

    # -- decoding --------------------------------------------------------------------------------------

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which answers leave out."""
        return token_id in self.special_ids

    def is_added(self, token_id: int) -> bool:
        """Whether the token was added to the vocabulary as a whole text (special or not)."""
        return token_id in self._added

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token stands for; b"" for ids that the vocabulary leaves empty.

        Raises InvalidRequest for ids outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequest(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        data = self._bytes[token_id]
        if data is None:
            data = self._bytes[token_id] = self._compute_bytes(token_id)
        return data

    def _compute_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        piece = self._parsing.id_to_token(token_id)
        if piece is None or piece.startswith(NAMELESS):
            return b""
        if self._byte_level:
            alphabet = self._alphabet
            if all(char in alphabet for char in piece):
                return bytes([alphabet[char] for char in piece])
            return piece.encode()
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        return piece.replace(_SPACE, " ").encode()

    def token_text(self, token_id: int) -> str:
        """One token as logprobs show it: its text, or ``bytes:\\xf0\\x9f`` when it is no whole character."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_id(self, text: str) -> int | None:
        """Id of the added token or vocabulary entry spelled exactly so."""
        return _token_id(self._parsing, text)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False, at_start: bool = True) -> str:
        """Text of ``token_ids``; bytes that form no character become U+FFFD.

        ``at_start``: the ids begin a text (see ``strips_leading_space``), rather than continue one.
        """
        if skip_special:
            token_ids = [token_id for token_id in token_ids if token_id not in self.special_ids]
        data = [self.token_bytes(token_id) for token_id in token_ids]
        if at_start and self.strips_leading_space:
            first = next((index for index, part in enumerate(data) if part), None)
            if first is not None and not self.is_added(token_ids[first]):
                data[first] = data[first].removeprefix(b" ")
        return b"".join(data).decode(errors="replace")


def _token_id(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    # The batch call releases the interpreter lock, the single one does not.
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _view(backend: tokenizers.Tokenizer, inner: bool) -> tokenizers.Tokenizer:
    """A tokenizer over the same vocabulary that takes special tokens' text as ordinary text."""
    view = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        view.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        view.pre_tokenizer = _without_prefix(backend.pre_tokenizer) if inner else backend.pre_tokenizer
    added = backend.get_added_tokens_decoder()
    view.add_tokens([added[token_id] for token_id in sorted(added)])
    if view.get_added_tokens_decoder().keys() != added.keys():
        # Ids with gaps between them cannot be added one by one: copy everything instead.
        view = tokenizers.Tokenizer.from_str(backend.to_str())
        if inner and backend.pre_tokenizer is not None:
            view.pre_tokenizer = _without_prefix(backend.pre_tokenizer)
    view.encode_special_tokens = True
    return view


def _without_prefix(pre_tokenizer: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """The same pre-tokenizer, without the space that a "first" scheme puts in front of a text."""
    first, never = b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'
    state: bytes = pre_tokenizer.__getstate__()
    if first not in state:
        return pre_tokenizer
    copy = pre_tokenizers.Sequence([])
    copy.__setstate__(state.replace(first, never))
    return copy


def _state(component: Any) -> object:
    """A backend component's JSON, or None when there is none."""
    return None if component is None else json.loads(component.__getstate__())


def _mentions(state: object, kind: str) -> bool:
    """Whether a component is of this type, alone or inside a sequence."""
    if isinstance(state, dict):
        return state.get("type") == kind or any(_mentions(value, kind) for value in state.values())
    return isinstance(state, list) and any(_mentions(value, kind) for value in state)


def _strips_leading_space(state: object) -> bool:
    """Whether a decoder removes the space in front of a text (``Strip`` of the start, or ``Metaspace``)."""
    if isinstance(state, list):
        return any(map(_strips_leading_space, state))
    if not isinstance(state, dict):
        return False
    if state.get("type") == "Strip":
        return state.get("content") == " " and bool(state.get("start"))
    if state.get("type") == "Metaspace":
        return state.get("prepend_scheme") != "never"
    return _strips_leading_space(state.get("decoders"))


def _default_bos(backend: tokenizers.Tokenizer, bos_id: int | None) -> bool:
    """Whether the backend's post-processor begins a text with the beginning-of-sequence token."""
    return bos_id is not None and backend.encode("a", add_special_tokens=True).ids[:1] == [bos_id]


def _closing_ids(backend: tokenizers.Tokenizer) -> list[int]:
    """The special tokens that the backend's post-processor puts behind a text."""
    plain, whole = (backend.encode("a", add_special_tokens=added).ids for added in (False, True))
    first = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
    return [] if first is None or not plain else whole[first + len(plain) :]
