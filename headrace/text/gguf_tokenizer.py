"""Tokenizer from the metadata of a GGUF file.

Two kinds of vocabulary: "gpt2" is byte-level BPE with its list of merges; "llama" is sentencepiece, whose pieces
carry scores instead. There, two neighbours merge when the joined text is a piece, best score first, which is BPE
with every way of splitting a piece as a merge, in order of the pieces' scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headrace.errors import ModelFileError
from headrace.text.gguf_patterns import WordScheme, word_scheme
from headrace.text.tokenizer import NAMELESS, Tokenizer

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_ROLES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "seperator": "sep_token",  # spelled so in the format
    "padding": "pad_token",
    "mask": "mask_token",
}


def gguf_tokenizer(metadata: Mapping[str, object], file: str) -> Tokenizer:
    """Tokenizer described by GGUF ``metadata``; ``file`` is named in errors (ModelFileError)."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens", file)
    types = _token_types(metadata, len(tokens), file)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        name = str(metadata.get("tokenizer.ggml.pre", "default"))
        scheme = word_scheme(name)
        if scheme is None:
            raise ModelFileError(f"{file}: tokenizer.ggml.pre '{name}' is not supported")
        backend = _byte_level(tokens, _strings(metadata, "tokenizer.ggml.merges", file), scheme, file)
        add_bos = scheme.add_bos
    elif kind == "llama":
        backend = sentencepiece_tokenizer(
            tokens,
            _scores(metadata, len(tokens), file),
            types,
            unknown=_role_token(metadata, "unknown", tokens, file),
            space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True) is True,
        )
        add_bos = True
    else:
        raise ModelFileError(f"{file}: tokenizer.ggml.model '{kind}' is not supported (gpt2 and llama are)")
    _add_whole_tokens(backend, tokens, types)
    named = {
        role: token
        for key, role in _ROLES.items()
        if (token := _role_token(metadata, key, tokens, file)) is not None
    }
    declared = metadata.get("tokenizer.ggml.add_bos_token")
    return Tokenizer(backend, named, declared if isinstance(declared, bool) else add_bos)


def _byte_level(
    tokens: Sequence[str], merges: Sequence[str], scheme: WordScheme, file: str
) -> tokenizers.Tokenizer:
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    try:
        model = models.BPE(_vocabulary(tokens), pairs, ignore_merges=scheme.ignore_merges)
    except Exception as error:  # the library raises plain Exception, for a merge of unknown pieces for example
        raise ModelFileError(f"{file}: tokenizer.ggml.merges do not fit the tokens: {error}") from None
    backend = tokenizers.Tokenizer(model)
    if scheme.compose:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in scheme.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece_tokenizer(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    unknown: str | None,
    space_prefix: bool,
) -> tokenizers.Tokenizer:
    """Sentencepiece's BPE over scored pieces, without the added tokens.

    ``space_prefix``: a space is put in front of the text, and of what follows a control token.
    """
    vocabulary = _vocabulary(pieces)
    model = models.BPE(
        vocabulary,
        _derived_merges(pieces, scores, types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    backend = tokenizers.Tokenizer(model)
    replace: normalizers.Normalizer = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if space_prefix else replace
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _derived_merges(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, the best-scored pieces first (ties: lower id, shorter left part)."""
    known = {piece for piece, kind in zip(pieces, types, strict=True) if kind == _NORMAL}
    order = sorted(range(len(pieces)), key=lambda token_id: -scores[token_id])
    merges: list[tuple[str, str]] = []
    for token_id in order:
        piece = pieces[token_id]
        if types[token_id] != _NORMAL:
            continue
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in known:
                right = piece[cut:]
                if right in known:
                    merges.append((left, right))
    return merges


def _add_whole_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control and unknown tokens are special; user-defined ones are whole texts that anybody may write."""
    added = [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Text -> id; an empty text or one that came before gets a name of its own and is never produced."""
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        unique = token if token and token not in vocabulary else f"{NAMELESS}{token_id}"
        vocabulary[unique] = token_id
    return vocabulary


# -- metadata ------------------------------------------------------------------------------------------


def _strings(metadata: Mapping[str, object], key: str, file: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values:
        raise ModelFileError(f"{file}: metadata {key} is missing")
    strings = [value for value in values if isinstance(value, str)]
    if len(strings) != len(values):
        raise ModelFileError(f"{file}: metadata {key} holds something that is no text")
    if not all(map(_is_unicode, strings)):
        raise ModelFileError(f"{file}: metadata {key} holds text that is not UTF-8")
    return strings


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _token_types(metadata: Mapping[str, object], count: int, file: str) -> list[int]:
    values = metadata.get("tokenizer.ggml.token_type")
    if values is None:
        return [_NORMAL] * count
    if not isinstance(values, list) or len(values) != count or not all(isinstance(v, int) for v in values):
        raise ModelFileError(f"{file}: metadata tokenizer.ggml.token_type does not fit the {count} tokens")
    return values


def _scores(metadata: Mapping[str, object], count: int, file: str) -> list[float]:
    values = metadata.get("tokenizer.ggml.scores")
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(isinstance(v, (int, float)) for v in values)
    ):
        raise ModelFileError(f"{file}: metadata tokenizer.ggml.scores does not fit the {count} tokens")
    return values


def _role_token(metadata: Mapping[str, object], role: str, tokens: Sequence[str], file: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise ModelFileError(
            f"{file}: tokenizer.ggml.{role}_token_id is {token_id!r}, outside the {len(tokens)} tokens"
        )
    return tokens[token_id]
