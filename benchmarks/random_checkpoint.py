"""Writes a shape of shapes.py as a checkpoint in the Hugging Face layout: random weights, a tokenizer that fits.

    python benchmarks/random_checkpoint.py llama-1b /tmp/llama-1b
    python benchmarks/random_checkpoint.py small-moe /tmp/small-moe-4bit 4

The tokenizer has the model's whole vocabulary, so that every sampled token has text: 256 bytes, invented words
behind a space, and four special tokens at the end. It has no merges: a prompt of ASCII text has as many tokens as
characters, and its chat template adds four to one user message.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TEMPLATE_TOKENS = 4
SPECIALS = ("<|user|>", "<|end|>", "<|assistant|>", "<|eos|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ 'user' if message.role == 'system' else message.role }}|>\n"
    "{{- message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>:{% endif %}"
)


def write(shape: str, folder: Path, bits: int = 16) -> None:
    """Weights are bfloat16, or packed to ``bits`` (4, 8) in groups of 64; the folder is made."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from model_shapes import random_model
    from shapes import SHAPES

    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    eos = config["vocab_size"] - 1
    write_tokenizer(folder, config["vocab_size"])
    described = {**config, "torch_dtype": "bfloat16", "eos_token_id": eos, "hidden_act": "silu"}
    if bits < 16:
        described["quantization"] = {"bits": bits, "group_size": 64}
    (folder / "config.json").write_text(json.dumps(described))
    weights = dict(tree_flatten(random_model(shape, bits=bits).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level tokenizer of exactly ``size`` tokens (at least 260)."""
    first_special = size - len(SPECIALS)
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    vocabulary |= {f"\u0120{_word(token)}": token for token in range(256, first_special)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": first_special + i, "content": text, **flags} for i, text in enumerate(SPECIALS)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocabulary, "merges": [],
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[-1],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0x100)} - {0xAD}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _word(number: int) -> str:
    """A pronounceable word, another one for each number."""
    syllables = []
    while number:
        number, rest = divmod(number, 70)
        syllables.append("bdfgklmnprstvz"[rest // 5] + "aeiou"[rest % 5])
    return "".join(syllables)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:4]))
