"""Tokenizers from GGUF metadata, against the libraries whose vocabularies they are."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace.errors import ModelFileError
from headrace.text.gguf_patterns import word_scheme
from headrace.text.gguf_tokenizer import gguf_tokenizer
from headrace.text.tokenizer import Tokenizer

LINES = [
    "The cat sat on the mat, and the dog sat on the log; the cat's hat fell.",
    "def f(x):\n    return x + 1  # 12345 times",
    "for (int i = 0; i < 100; ++i) { sum += a[i]; }",
    "Ein Café in Köln, das 7 Tage offen hat. I'll say they're DON'T",
    "你好 世界 今天天气很好",
    "https://example.org/path?q=1&r=2 user@example.org",
]
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# What merges cannot tell apart from the vocabulary's own characters is left out.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters=SPACE + "\0"), max_size=30) | st.lists(
    st.sampled_from([*LINES, " ", "  ", "   ", "\n", "\n\n", "\t", "1", "😀", "é"]), max_size=5
).map("".join)


# -- sentencepiece -------------------------------------------------------------------------------------


def trained_sentencepiece(space_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in LINES for line in text.split("\n")] * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=space_prefix,
        remove_extra_whitespaces=False,
        control_symbols=["<turn>"],
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def metadata_of(processor: sentencepiece.SentencePieceProcessor, space_prefix: bool) -> dict[str, object]:
    def kind(token_id: int) -> int:
        if processor.is_unknown(token_id):
            return 2
        if processor.is_control(token_id):
            return 3
        if processor.is_byte(token_id):
            return 6
        return 4 if processor.id_to_piece(token_id) == "<think>" else 1

    ids = range(processor.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(token_id) for token_id in ids],
        "tokenizer.ggml.scores": [processor.get_score(token_id) for token_id in ids],
        "tokenizer.ggml.token_type": [kind(token_id) for token_id in ids],
        "tokenizer.ggml.add_space_prefix": space_prefix,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
    }


PROCESSORS = {prefix: trained_sentencepiece(prefix) for prefix in (False, True)}
PIECES = {prefix: gguf_tokenizer(metadata_of(p, prefix), "m.gguf") for prefix, p in PROCESSORS.items()}


@pytest.mark.parametrize("prefix", [False, True])
@settings(max_examples=150)
@given(text=TEXT)
def test_pieces_are_sentencepieces(prefix: bool, text: str) -> None:
    tokenizer = PIECES[prefix]
    ids = tokenizer.encode(text, parse_special=False, add_bos=False)
    assert ids == PROCESSORS[prefix].encode(text)
    assert tokenizer.decode(ids) == text


def test_pieces_roles() -> None:
    tokenizer = PIECES[True]
    assert tokenizer.adds_bos
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert {"<unk>", "<s>", "</s>", "<turn>"} == {tokenizer.token_text(i) for i in tokenizer.special_ids}
    assert tokenizer.named == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    think = tokenizer.token_id("<think>")
    assert think in tokenizer.encode("a<think>b", parse_special=False)
    assert tokenizer.token_id("<turn>") in tokenizer.encode("a<turn>b", parse_special=True)


# -- byte-level BPE ------------------------------------------------------------------------------------


def trained_bpe(pre_tokenizer: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(LINES * 3, trainer)
    return backend


def bpe_metadata(backend: tokenizers.Tokenizer, scheme: str, **more: object) -> dict[str, object]:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": scheme,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


REFERENCES = {
    "gpt-2": trained_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": trained_bpe(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
}
BYTE_LEVEL = {name: gguf_tokenizer(bpe_metadata(backend, name), "m.gguf") for name, backend in REFERENCES.items()}


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=150)
@given(text=TEXT)
def test_byte_level_is_the_reference(name: str, text: str) -> None:
    tokenizer = BYTE_LEVEL[name]
    ids = tokenizer.encode(text, parse_special=True)
    assert ids == REFERENCES[name].encode(text).ids
    assert tokenizer.decode(ids) == text


WORDS = [
    ("gpt-2", "I'll  do\n123 €uro", ["I", "'ll", " ", " do", "\n", "123", " €", "uro"]),
    ("smollm", "a 123b", ["a", " ", "1", "2", "3", "b"]),
    ("llama-bpe", "I'LL 12345 a.b\n\n x", ["I", "'LL", " ", "123", "45", " a", ".b", "\n\n", " x"]),
    ("qwen2", "I'LL 123 a.b\n\n x", ["I", "'LL", " ", "1", "2", "3", " a", ".b", "\n\n", " x"]),
    (
        "gpt-4o",
        "camelCase HTTPServer don't 1234/\n",
        ["camel", "Case", " HTTPServer", " don't", " ", "123", "4", "/\n"],
    ),
    ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
    ("deepseek-v3", "x=12345 你好a(b", ["x", "=", "123", "45", " ", "你好", "a", "(b"]),
    ("deepseek-coder", "a 12\n你好", ["a", " ", "1", "2", "\n", "你好"]),
    ("default", "a=1234", ["a", "=", "123", "4"]),
]


@pytest.mark.parametrize(("scheme", "text", "words"), WORDS, ids=[word[0] for word in WORDS])
def test_words(scheme: str, text: str, words: list[str]) -> None:
    known = word_scheme(scheme)
    assert known is not None
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in known.patterns]
    pieces = pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)
    assert [piece for piece, _ in pieces] == words


def test_beginning_of_sequence_by_scheme_and_by_declaration() -> None:
    backend = REFERENCES["gpt-2"]

    def adds(scheme: str, **more: object) -> bool:
        return gguf_tokenizer(bpe_metadata(backend, scheme, bos_token_id=0, **more), "m.gguf").adds_bos

    assert not adds("gpt-2")
    assert adds("llama-bpe")
    assert adds("gpt-2", add_bos_token=True)
    assert not adds("llama-bpe", add_bos_token=False)


def test_qwen_composes_characters() -> None:
    tokenizer = gguf_tokenizer(bpe_metadata(REFERENCES["gpt-2"], "qwen2"), "m.gguf")
    assert tokenizer.decode(tokenizer.encode("cafe\u0301", parse_special=False)) == "café"


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer.ggml.pre": "mystery"}, "tokenizer.ggml.pre 'mystery'"),
    ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model 'rwkv'"),
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.tokens": ["a", "\udcff"]}, "not UTF-8"),
    ({"tokenizer.ggml.token_type": [1]}, "token_type"),
    ({"tokenizer.ggml.merges": ["zz qq"]}, "merges"),
    ({"tokenizer.ggml.eos_token_id": 100_000}, "eos_token_id"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN, ids=[word[1] for word in BROKEN])
def test_broken_metadata_is_named(change: dict[str, Any], words: str) -> None:
    metadata = {**bpe_metadata(REFERENCES["gpt-2"], "gpt-2"), **change}
    if "tokens" in words or "UTF-8" in words:
        metadata["tokenizer.ggml.token_type"] = None
    with pytest.raises(ModelFileError, match=words) as caught:
        gguf_tokenizer(metadata, "m.gguf")
    assert str(caught.value).startswith("m.gguf: ")


def test_duplicates_and_gaps_in_the_tokens() -> None:
    metadata = metadata_of(PROCESSORS[False], False)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    metadata["tokenizer.ggml.tokens"] = [*tokens[:-2], "", tokens[300]]
    tokenizer: Tokenizer = gguf_tokenizer(metadata, "m.gguf")
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.decode([len(tokens) - 2, len(tokens) - 1]) == ""
    assert tokenizer.encode(tokens[300].replace(SPACE, " "), parse_special=False, add_bos=False) == [300]
