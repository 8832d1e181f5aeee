"""Tokenizer of a model folder (Hugging Face and MLX layout).

``tokenizer.json`` holds the vocabulary; ``tokenizer_config.json``, ``special_tokens_map.json`` and
``added_tokens.json`` name tokens' roles and may add tokens that it lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from headrace.checkpoint.config import read_json_object
from headrace.errors import ModelFileError
from headrace.text.tokenizer import Tokenizer

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OTHER_FORMATS = ("tokenizer.model", "tiktoken.model", "vocab.json")


def read_optional(path: Path) -> dict[str, object]:
    """The JSON object in ``path``, {} when there is no such file. Raises ModelFileError naming the file."""
    return dict(read_json_object(path)) if path.exists() else {}


def load_folder_tokenizer(folder: Path) -> Tokenizer:
    """Tokenizer of the model in ``folder``; raises ModelFileError naming the file at fault."""
    config = read_optional(folder / "tokenizer_config.json")
    roles = {**read_optional(folder / "special_tokens_map.json"), **_present(config)}
    backend = _read_backend(folder / "tokenizer.json")
    _add_missing(backend, config, read_optional(folder / "added_tokens.json"))
    named = {role: text for role in _ROLES if (text := token_content(roles.get(role))) is not None}
    _mark_special(backend, [*named.values(), *_further_special(roles)])
    add_bos = config.get("add_bos_token")
    return Tokenizer(backend, named, add_bos if isinstance(add_bos, bool) else None)


def token_content(entry: object) -> str | None:
    """A token in these files is its text, or an object with the text in ``content``."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) and entry else None


def _present(config: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in config.items() if value is not None}


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except FileNotFoundError:
        others = [name for name in _OTHER_FORMATS if path.with_name(name).exists()]
        hint = f" ({others[0]} alone is not enough: save it as {path.name} with transformers)" if others else ""
        raise ModelFileError(f"{path.name}: missing from the model folder{hint}") from None
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # the library raises plain Exception for anything it cannot parse
        raise ModelFileError(f"{path.name}: not a tokenizer: {error}") from None
    # Saved training settings would cut or pad prompts silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, object], added: Mapping[str, object]) -> None:
    """Add the tokens that only the configuration knows, in the order of their ids."""
    missing: dict[int, AddedToken] = {}
    for token_id, token in _declared(config, added):
        known = backend.token_to_id(token.content)
        if known is None:
            missing[token_id] = token
        elif known != token_id:
            raise ModelFileError(
                f"tokenizer_config.json: token '{token.content}' has id {token_id}, in tokenizer.json {known}"
            )
    for token_id in sorted(missing):
        token = missing[token_id]
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise ModelFileError(
                f"tokenizer_config.json: token '{token.content}' cannot have id {token_id}: "
                f"tokenizer.json has {backend.get_vocab_size()} tokens without gaps"
            )


def _declared(config: Mapping[str, object], added: Mapping[str, object]) -> Iterator[tuple[int, AddedToken]]:
    decoder = config.get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, Mapping) else ():
        text = token_content(entry)
        if text is None or not str(key).isdigit():
            raise ModelFileError(f"tokenizer_config.json: added_tokens_decoder entry '{key}' is no token")
        flags = {
            flag: bool(entry.get(flag, False))
            for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        yield int(key), AddedToken(text, **flags)
    for text, token_id in added.items():
        if isinstance(token_id, int):
            yield token_id, AddedToken(text, normalized=False, special=False)


def _further_special(roles: Mapping[str, object]) -> Iterator[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        entries = roles.get(key)
        values = list(entries.values()) if isinstance(entries, Mapping) else entries
        for entry in values if isinstance(values, list) else ():
            text = token_content(entry)
            if text is not None:
                yield text


def _mark_special(backend: tokenizers.Tokenizer, texts: list[str]) -> None:
    """Tokens with a role are special, whatever ``tokenizer.json`` says; those it lacks have no id and stay out."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for text in texts:
        if text not in special and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])
            special.add(text)
