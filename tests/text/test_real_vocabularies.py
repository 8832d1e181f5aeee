"""Vocabularies of released models, where they are at hand: HEADRACE_TEST_MODELS names a folder of GGUF files."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from headrace.checkpoint.gguf_file import read_metadata
from headrace.text import model_text

pytestmark = pytest.mark.slow

TEXTS = [
    "Hello world 12345, it's 3.14!",
    " def f(x):\n    return x  +1\n\n\n\tend\r\n",
    "你好，世界。今天天气很好 😀 café e\u0301",
    "a   b    c     ",
    "ΑΒΓ привет العربية हिन्दी ไทย 한국어 日本語",
    "👨\u200d👩\u200d👧 ❤\ufe0f 🇩🇪",
    "https://example.org/?q=a%20b&x=1#y <div class='z'>&nbsp;</div>",
    "\0 \uffff \ufeff",
    Path(__file__).read_text(),
]


def model_file(name: str) -> Path:
    path = Path(os.environ.get("HEADRACE_TEST_MODELS", "")) / name
    if not path.is_file():
        pytest.skip(f"{name} is not at hand")
    return path


def test_smollm2_is_digits_and_byte_level() -> None:
    path = model_file("SmolLM2-135M-Instruct.Q4_1.gguf")
    metadata: dict[str, Any] = read_metadata(path)
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    reference = Backend(models.BPE(vocabulary, merges))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = model_text.load(path)
    for text in TEXTS:
        ids = model.tokenizer.encode(text, parse_special=False)
        assert ids == reference.encode(text).ids
        assert model.tokenizer.decode(ids) == text
    assert [model.tokenizer.token_text(i) for i in sorted(model.end_token_ids)] == ["<|im_end|>"]
    rendered = model.chat_template.render([{"role": "user", "content": "hi"}])
    assert rendered.text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert model.tokenizer.decode(rendered.token_ids) == rendered.text


def test_gemma3_is_sentencepiece() -> None:
    path = model_file("gemma-3-270m-q4_k_m.gguf")
    processor = sentencepiece.SentencePieceProcessor(model_proto=_sentencepiece_model(read_metadata(path)))
    tokenizer = model_text.load(path).tokenizer
    assert tokenizer.adds_bos
    for text in TEXTS:
        ids = tokenizer.encode(text, parse_special=False, add_bos=False)
        assert ids == processor.encode(text)
        assert tokenizer.decode(ids) == text


# -- sentencepiece's own file format (protocol buffers) from GGUF metadata -----------------------------


def _sentencepiece_model(metadata: dict[str, Any]) -> bytes:
    columns = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    pieces = []
    for piece, score, kind in zip(*columns, strict=True):
        shown = piece.replace(" ", "\N{LOWER ONE EIGHTH BLOCK}") if kind == 4 else piece
        kind = 2 if piece == "<unk>" else kind
        pieces.append(_message(1, _message(1, shown.encode()) + _float(2, score) + _integer(3, kind)))
    bpe, fallback = _integer(3, 2), _integer(35, 1)
    roles = _integer(40, 3) + _integer(41, 2) + _integer(42, 1) + _integer(43, 0)
    normalizer = _message(1, b"identity") + _integer(3, 0) + _integer(4, 0) + _integer(5, 1)
    return b"".join(pieces) + _message(2, bpe + fallback + roles) + _message(3, normalizer)


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _integer(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _float(field: int, number: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", number)
