"""Small tokenizers of every kind that models come with, all with the same special and added tokens."""

from __future__ import annotations

from collections.abc import Callable

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headrace.text.gguf_tokenizer import sentencepiece_tokenizer
from headrace.text.tokenizer import Tokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CORPUS = ["the cat sat on the mat and the dog sat on the log", "def f(x): return x + 1", "café naïve 你好 世界"]
WORDS = [
    "th",
    "he",
    "the",
    "at",
    "cat",
    "on",
    f"{SPACE}t",
    f"{SPACE}the",
    f"{SPACE}a",
    "an",
    "and",
    SPACE * 2,
    "é",
    "你",
]


def _add(backend: tokenizers.Tokenizer, strips: bool = False) -> tokenizers.Tokenizer:
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken("<|turn|>", special=True, normalized=False, lstrip=strips, rstrip=strips)])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend


def byte_level() -> Tokenizer:
    """GPT-2's kind, as Llama 3 and Qwen have it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(_add(backend), NAMED)


def _pieces() -> tuple[list[str], list[float], list[int]]:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    types = [6] * 256
    letters = sorted({*"abcdefghijklmnopqrstuvwxyz()+:1 é你好"} - {" "} | {SPACE})
    normal = [*WORDS, *(letter for letter in letters if letter not in WORDS)]
    return [*pieces, *normal], [float(-index) for index in range(256 + len(normal))], types + [1] * len(normal)


def sentencepiece(space_prefix: bool = False) -> Tokenizer:
    """Gemma's kind, or with ``space_prefix`` Llama 2's: spaces as text, unknown characters as bytes."""
    pieces, scores, types = _pieces()
    backend = sentencepiece_tokenizer(pieces, scores, types, unknown=None, space_prefix=space_prefix)
    return Tokenizer(_add(backend), NAMED, add_bos=True)


def metaspace_first(strips: bool = False) -> Tokenizer:
    """Mistral's kind: the space is put in front of the whole text alone."""
    pieces, scores, types = _pieces()
    backend = sentencepiece_tokenizer(pieces, scores, types, unknown=None, space_prefix=True)
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    _add(backend, strips)
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    return Tokenizer(backend, NAMED)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece_prefix": lambda: sentencepiece(space_prefix=True),
    "metaspace_first": metaspace_first,
    "metaspace_first_strips": lambda: metaspace_first(strips=True),
}
