"""A checkpoint that says known text: wrong, stale or foreign KV shows as wrong words.

It is one ordinary Llama layer with hand-made weights. The residual stream holds the current token (one-hot), a
constant, and whether the token is a trigger ``<|sNN|>``:

    attention   every query matches triggers alone (score 50 against 0), so the trigger's identity is copied from
                wherever it stands in the context, through the KV cache
    MLP         one unit per pair (script, current token) fires and writes the script's next token

The next token wins by about 20 nats, which no rounding, chunking or cache quantization crosses. The prompt holds
exactly one trigger; without one (or with one outside the window) the model repeats its last token. One ASCII byte
is one token, every ``<|…|>`` is one token, so a user turn of n bytes costs n + 3 tokens, and one more per trigger.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN = 640
HEAD_DIM = 64
UNITS = 256
CONTEXT = 8192
SPECIALS = ("<|eos|>", "<|im_end|>", "<|assistant|>", "<|user|>", "<|system|>", "<|tool|>")


@dataclass(frozen=True)
class Script:
    """A text as single tokens (bytes each, none twice); ``loops``: it starts again instead of ending."""

    pieces: tuple[bytes, ...]
    loops: bool = False


def _script(*pieces: str | bytes, loops: bool = False) -> Script:
    return Script(tuple(piece.encode() if isinstance(piece, str) else piece for piece in pieces), loops)


def _bytewise(character: str) -> list[bytes]:
    return [bytes([byte]) for byte in character.encode()]


SCRIPTS = {
    "s00": _script("Al", "pha", " be", "ta", " gam", "ma", " del", "ta."),
    "s01": _script(" one", " two", " three", " four", " five", " six", loops=True),
    "s02": _script("ok ", *_bytewise("😀"), " caf", *_bytewise("é"), " end"),
    "s03": _script("<thi", "nk>", "plan", " it", "</th", "ink>", "42"),
    "s04": _script(
        *("Sure. ", "<tool", "_call>", '\n{"na', 'me": "add", ', '"arguments": {"a": 1, ', '"s": "'),
        *_bytewise("é"),
        *('\\n"', "}}\n", "</tool", "_cal", "l>"),
    ),
    "s05": _script(*"ABCDEFGH"),
    "s06": _script("x ", *_bytewise("😀")[:3]),
    "s07": _script(
        *("caf", "e", "\N{COMBINING ACUTE ACCENT}", "x ", "\N{MAN}", "\N{ZERO WIDTH JOINER}", "\N{GIRL}"),
        *(" \N{HEAVY BLACK HEART}", "\N{VARIATION SELECTOR-16}", "."),
    ),
    "s08": _script("<tool", "_call>", '\n{"na', 'me": "add", "argu', 'ments": {"a": ', "</tool", "_cal", "l>"),
    "s09": _script(
        *("<tool", "_call>", '\n{"name": "add", "arguments": {"a": 1}}', "\n</tool", "_cal", "l>"),
        *("\n<to", "ol_call>", '\n{"name": "mul", "arguments": {"b": 2}}\n', "</to", "ol_ca", "ll>"),
    ),
    "s10": _script("Use ", "<think>", " and ", "<tool_call>", " tags ", "</think>", " here", "."),
    "s11": _script("plan", " it", "</th", "ink>", "42"),
    "s12": _script("<think>", "a", "</think>", " be", "fore ", "<thi", "nk>", "b", "</th", "ink>", " after"),
}


@dataclass(frozen=True)
class Variant:
    """How the same weights are written down.

    ``eos_in``: files that declare the turn's end token; the others name ``<|eos|>``, which is never sampled.
    ``window``: sliding window of the layer that does the work (a second, inert, full-attention layer follows).
    ``think_open``: the template opens ``<think>`` in the assistant's turn.
    """

    tied: bool = False
    shards: int = 1
    window: int | None = None
    kv_heads: int = HIDDEN // HEAD_DIM
    window_layers: int = 1  # in front of one that sees everything
    think_open: bool = False
    eos_in: tuple[str, ...] = ("config", "generation", "tokenizer")
    dtype: str = "float32"


VARIANTS = {
    "plain": Variant(),
    "tied": Variant(tied=True),
    "sharded": Variant(shards=3),
    "swa64": Variant(window=64),
    "swa64_deep": Variant(window=64, kv_heads=2, window_layers=5),
    "think_open": Variant(think_open=True),
    "eos_config": Variant(eos_in=("config",)),
    "eos_generation": Variant(eos_in=("generation",)),
    "eos_tokenizer": Variant(eos_in=("tokenizer",)),
    "fp16": Variant(dtype="float16"),
}


# -- what to expect ------------------------------------------------------------------------------------


def expected_pieces(script: str, max_tokens: int) -> list[bytes]:
    """Bytes of the tokens that show text, at most ``max_tokens``."""
    plan = SCRIPTS[script]
    return list(islice(cycle(plan.pieces) if plan.loops else plan.pieces, max_tokens))


def expected_text(script: str, max_tokens: int = 40) -> str:
    """Greedy text within ``max_tokens``; an unfinished character at its end is one U+FFFD."""
    return b"".join(expected_pieces(script, max_tokens)).decode(errors="replace")


def expected_finish(script: str, max_tokens: int = 40) -> str:
    """ "stop" when the end token is sampled within ``max_tokens``, else "length"."""
    plan = SCRIPTS[script]
    return "length" if plan.loops or max_tokens <= len(plan.pieces) else "stop"


def expected_prompt_tokens(content: str) -> int:
    """Prompt tokens of a chat with one user message (specials in it count as bytes, triggers as one token)."""
    triggers = 0
    for name in SCRIPTS:
        triggers += content.count(f"<|{name}|>")
        content = content.replace(f"<|{name}|>", "")
    return len(content.encode()) + triggers + 3


# -- the checkpoint ------------------------------------------------------------------------------------


def byte_characters() -> list[str]:
    """Byte -> its character in a byte-level vocabulary."""
    visible = [chr(byte) for byte in range(256) if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD)]
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if chr(byte) in visible else chr(next(hidden)) for byte in range(256)]


@dataclass(frozen=True)
class Vocabulary:
    """``ids``: piece -> id; ``added``: text of special tokens and triggers -> id, behind the pieces."""

    ids: dict[bytes, int]
    added: dict[str, int]

    @property
    def size(self) -> int:
        return len(self.ids) + len(self.added)


def vocabulary() -> Vocabulary:
    """Every byte, then every script's pieces, then the special tokens, then the triggers."""
    ids = {bytes([byte]): byte for byte in range(256)}
    for script in SCRIPTS.values():
        assert len(set(script.pieces)) == len(script.pieces)
        for piece in script.pieces:
            ids.setdefault(piece, len(ids))
    texts = [*SPECIALS, *(f"<|{name}|>" for name in SCRIPTS)]
    return Vocabulary(ids, {text: len(ids) + index for index, text in enumerate(texts)})


def build(folder: str | Path, variant: Variant = VARIANTS["plain"]) -> Path:
    """Write the checkpoint (about 10 MB a layer) into ``folder`` and return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    words = vocabulary()
    _write_weights(folder, _weights(words, variant), variant)
    _write_json(folder / "config.json", _config(words, variant))
    ends = _end_ids(words)
    if variant.eos_in != ("config",):
        declared: object = ends if "generation" in variant.eos_in else ends[1]
        _write_json(folder / "generation_config.json", {"eos_token_id": declared})
    _write_json(folder / "tokenizer.json", _tokenizer(words))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(variant))
    return folder


def _weights(words: Vocabulary, variant: Variant) -> dict[str, np.ndarray]:
    """Residual dimensions: one per token, then constant, trigger mark, its opposite, one per script."""
    constant, trigger, ordinary = range(words.size, words.size + 3)
    first_script = words.size + 3
    triggers = [words.added[f"<|{name}|>"] for name in SCRIPTS]
    assert first_script + len(triggers) <= HIDDEN

    embedding = np.zeros((words.size, HIDDEN))
    embedding[np.arange(words.size), np.arange(words.size)] = 1
    embedding[:, constant] = 1
    embedding[:, ordinary] = 1
    embedding[triggers, ordinary], embedding[triggers, trigger] = 0, 1

    query, key, value, output = (np.zeros((HIDDEN, HIDDEN)) for _ in range(4))
    slowest = HEAD_DIM // 2 - 1  # the rotary pair that hardly turns within the context
    query[slowest, constant] = key[slowest, trigger] = 20.0  # 20 * 20 / sqrt(64) = 50
    for number, token in enumerate(triggers):
        value[number, token] = 1
        output[first_script + number, number] = 1

    gate, up, down = np.zeros((UNITS, HIDDEN)), np.zeros((UNITS, HIDDEN)), np.zeros((HIDDEN, UNITS))
    gate[:, constant] = -60.0  # fires when both conditions add 40
    up[:, constant] = 1
    for unit, (number, current, following) in enumerate(_transitions(words)):
        gate[unit, [current, first_script + number]] = 40.0
        down[following, unit] = 1

    # One head does it all, the first; the others look at everything and are not listened to.
    key, value = key[: variant.kv_heads * HEAD_DIM], value[: variant.kv_heads * HEAD_DIM]

    # Norm weights undo the normalisation: before attention 3 dimensions are 1, after it 4.
    layer = {
        "self_attn.q_proj": query,
        "self_attn.k_proj": key,
        "self_attn.v_proj": value,
        "self_attn.o_proj": output,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": down,
        "input_layernorm": np.full(HIDDEN, (3 / HIDDEN) ** 0.5),
        "post_attention_layernorm": np.full(HIDDEN, (4 / HIDDEN) ** 0.5),
    }
    weights = {f"model.layers.0.{name}.weight": array for name, array in layer.items()}
    if variant.window:
        inert = {name: array if "norm" in name else np.zeros_like(array) for name, array in layer.items()}
        for number in range(1, variant.window_layers + 1):
            weights |= {f"model.layers.{number}.{name}.weight": array for name, array in inert.items()}
    weights["model.embed_tokens.weight"] = embedding
    weights["model.norm.weight"] = np.ones(HIDDEN)
    if not variant.tied:
        weights["lm_head.weight"] = np.eye(words.size, HIDDEN)
    return weights


def _transitions(words: Vocabulary) -> list[tuple[int, int, int]]:
    """(script number, current token, next token); a script starts behind ``<|assistant|>`` or a line break."""
    found: list[tuple[int, int, int]] = []
    for number, script in enumerate(SCRIPTS.values()):
        tokens = [words.ids[piece] for piece in script.pieces]
        found += [(number, start, tokens[0]) for start in (words.added["<|assistant|>"], words.ids[b"\n"])]
        found += [(number, *pair) for pair in pairwise(tokens)]
        found.append((number, tokens[-1], tokens[0] if script.loops else words.added["<|im_end|>"]))
    assert len(found) <= UNITS
    return found


def _write_weights(folder: Path, weights: dict[str, np.ndarray], variant: Variant) -> None:
    arrays = {name: np.ascontiguousarray(weights[name].astype(variant.dtype)) for name in sorted(weights)}
    if variant.shards == 1:
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{index + 1:05d}-of-{variant.shards:05d}.safetensors" for index in range(variant.shards)]
    homes = dict(zip(arrays, islice(cycle(files), len(arrays)), strict=True))
    for file in files:
        part = {name: array for name, array in arrays.items() if homes[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(array.nbytes for array in arrays.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": homes})


def _end_ids(words: Vocabulary) -> list[int]:
    return [words.added["<|im_end|>"], words.added["<|eos|>"]]


def _config(words: Vocabulary, variant: Variant) -> dict[str, object]:
    ends = _end_ids(words)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": UNITS,
        "num_hidden_layers": 1 + variant.window_layers if variant.window else 1,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_key_value_heads": variant.kv_heads,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e8,
        "vocab_size": words.size,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": variant.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": variant.dtype,
        "eos_token_id": ends if "config" in variant.eos_in else ends[1],
    }
    if variant.window:
        config |= {
            "sliding_window": variant.window,
            "layer_types": [*["sliding_attention"] * variant.window_layers, "full_attention"],
        }
    return config


def _tokenizer(words: Vocabulary) -> dict[str, object]:
    characters = byte_characters()
    pieces = {"".join(characters[byte] for byte in piece): token for piece, token in words.ids.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added: Sequence[dict[str, object]] = [
        {"id": token, "content": text, "special": text in SPECIALS, **flags} for text, token in words.added.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": pieces,
            "merges": [],
        },
    }


def chat_template(think_open: bool = False) -> str:
    """Jinja text: every turn is ``<|role|>content<|im_end|>``; tools and calls appear as JSON."""
    opening = "<|assistant|>" + ("<think>\n" if think_open else "")
    return (
        "{% if tools %}<|system|>{{ tools | tojson }}<|im_end|>{% endif %}"
        "{% for message in messages %}<|{{ message.role }}|>"
        "{% if message.content is string %}{{ message.content }}"
        "{% elif message.content %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
        "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}" + opening + "{% endif %}"
    )


def _tokenizer_config(variant: Variant) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>" if "tokenizer" in variant.eos_in else "<|eos|>",
        "pad_token": "<|eos|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": chat_template(variant.think_open),
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
