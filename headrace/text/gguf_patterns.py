"""How byte-level vocabularies cut text into words before merging, by the name in ``tokenizer.ggml.pre``.

A scheme is a list of regular expressions. Each cuts every piece the ones before it left into matches and what
lies between them; merges never cross a cut.
"""

from __future__ import annotations

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_QWEN35 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}|" + _CASED_TAIL
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|" + _CASED_TAIL
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class WordScheme:
    """One way of cutting.

    Attributes:
        patterns: regular expressions, applied in order.
        ignore_merges: a word that is in the vocabulary as a whole is that token, whatever the merges say.
        add_bos: raw prompts begin with the beginning-of-sequence token unless the file says otherwise.
        compose: text is brought into Unicode's composed form (NFC) first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    compose: bool = False


_SINGLE_DIGITS = WordScheme((r"\p{N}", _GPT2))
_SCHEMES = {
    ("default",): WordScheme((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "mellum", "granite-docling"): (
        WordScheme((_GPT2,))
    ),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): _SINGLE_DIGITS,
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"): (
        WordScheme((_LLAMA3,), ignore_merges=True, add_bos=True)
    ),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): WordScheme((_LLAMA3,)),
    ("qwen2", "deepseek-r1-qwen"): WordScheme((_QWEN2,), compose=True),
    ("stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"): WordScheme((_QWEN2,)),
    ("qwen35",): WordScheme((_QWEN35,), compose=True),
    ("gpt-4o", "llama4", "minimax-m2"): WordScheme((_GPT4O,)),
    ("tekken",): WordScheme((_TEKKEN,), ignore_merges=True, add_bos=True),
    ("deepseek-coder",): WordScheme((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense"): WordScheme((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}


def word_scheme(name: str) -> WordScheme | None:
    """The scheme of that name, None when it is not known."""
    return next((scheme for names, scheme in _SCHEMES.items() if name in names), None)
