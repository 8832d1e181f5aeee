"""Everything about a model that concerns text: tokenizer, chat template, end tokens, defaults, length.

Read from a folder's JSON files or from a GGUF file's metadata; no weights, no MLX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.config import text_fields
from headrace.checkpoint.gguf_file import read_metadata
from headrace.errors import ModelFileError, StartupError
from headrace.text.chat_template import ChatTemplate
from headrace.text.folder_tokenizer import load_folder_tokenizer, read_optional
from headrace.text.gguf_tokenizer import gguf_tokenizer
from headrace.text.tokenizer import Tokenizer

# Name of a sampling default here -> (its name in generation_config.json, in GGUF metadata, lowest value, highest).
_DEFAULTS = {
    "temperature": ("temperature", "general.sampling.temp", 0.0, 100.0),
    "top_p": ("top_p", "general.sampling.top_p", 0.0, 1.0),
    "top_k": ("top_k", "general.sampling.top_k", 0, 1 << 31),
    "min_p": ("min_p", "general.sampling.min_p", 0.0, 1.0),
    "repetition_penalty": ("repetition_penalty", "general.sampling.penalty_repeat", 1e-6, 100.0),
}


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's text side. Immutable; shared by all requests.

    Attributes:
        tokenizer: of the model.
        chat_template: may be empty (``is_available``).
        end_token_ids: tokens that end an answer: the union of what all the model's files declare.
        sampling_defaults: those of ``headrace.config.GenerationDefaults`` that the model's files set.
        max_length: positions the model was made for (prompt and output), None when its files do not say.
        model_type: architecture name from config.json or the GGUF metadata, "" when absent.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    end_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, float | int]
    max_length: int | None
    model_type: str


def load(path: str | Path, chat_template_file: str | None = None) -> ModelText:
    """Read the text side of the model at ``path``, a folder or a ``.gguf`` file.

    Args:
        path: of the model.
        chat_template_file: Jinja file that replaces the model's own template.

    Raises ModelFileError naming the file at fault, and StartupError for ``chat_template_file``.
    """
    path = Path(path)
    override = None if chat_template_file is None else _read_template_file(Path(chat_template_file))
    try:
        return _load_folder(path, override) if path.is_dir() else _load_gguf(path, override)
    except OSError as error:
        name = Path(error.filename or path).name
        raise ModelFileError(f"{name}: cannot be read: {error.strerror or error}") from None


def _load_folder(folder: Path, override: str | None) -> ModelText:
    if not any(folder.iterdir()):
        raise ModelFileError(f"{folder.name}: the folder is empty")
    config = read_optional(folder / "config.json")
    generation = read_optional(folder / "generation_config.json")
    tokenizer = load_folder_tokenizer(folder)
    text_config = text_fields(config)
    declared = [
        *_ids(config.get("eos_token_id"), "config.json"),
        *_ids(text_config.get("eos_token_id"), "config.json"),
        *_ids(generation.get("eos_token_id"), "generation_config.json"),
    ]
    sources, origin = (
        ({"default": override}, "--chat-template") if override is not None else _folder_templates(folder)
    )
    defaults = {name: generation.get(field) for name, (field, *_) in _DEFAULTS.items()}
    end_token_ids = _end_tokens(tokenizer, declared)
    _refuse_foreign_tokenizer(end_token_ids, text_config.get("vocab_size"))
    return ModelText(
        tokenizer=tokenizer,
        chat_template=ChatTemplate(tokenizer, sources, origin),
        end_token_ids=end_token_ids,
        sampling_defaults=_checked_defaults(defaults, "generation_config.json"),
        max_length=_max_length(text_config, read_optional(folder / "tokenizer_config.json")),
        model_type=_text(config.get("model_type")),
    )


def _load_gguf(path: Path, override: str | None) -> ModelText:
    metadata = read_metadata(path)
    tokenizer = gguf_tokenizer(metadata, path.name)
    roles = ("eos", "eot", "eom")
    declared = [i for role in roles for i in _ids(metadata.get(f"tokenizer.ggml.{role}_token_id"), path.name)]
    sources = {"default": override} if override is not None else _gguf_templates(metadata)
    architecture = _text(metadata.get("general.architecture"))
    defaults = {name: metadata.get(key) for name, (_, key, *_) in _DEFAULTS.items()}
    length = metadata.get(f"{architecture}.context_length")
    return ModelText(
        tokenizer=tokenizer,
        chat_template=ChatTemplate(tokenizer, sources, path.name if override is None else "--chat-template"),
        end_token_ids=_end_tokens(tokenizer, declared),
        sampling_defaults=_checked_defaults(defaults, path.name),
        max_length=length if isinstance(length, int) and length > 0 else None,
        model_type=architecture,
    )


# -- chat templates ------------------------------------------------------------------------------------


def _read_template_file(path: Path) -> str:
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise StartupError(f"--chat-template {path}: cannot be read: {reason}") from None
    if not template.strip():
        raise StartupError(f"--chat-template {path}: the file is empty; every chat would be")
    return template


def _folder_templates(folder: Path) -> tuple[dict[str, str], str]:
    """Templates by name, and the file they come from. The first source that has any wins."""
    file = folder / "chat_template.jinja"
    if file.exists():
        sources = {"default": _read_model_template(file)}
        for further in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[further.stem] = _read_model_template(further)
        return sources, file.name
    for name in ("chat_template.json", "tokenizer_config.json"):
        sources = _named_templates(read_optional(folder / name).get("chat_template"), name)
        if sources:
            return sources, name
    return {}, "tokenizer_config.json"


def _read_model_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ModelFileError(f"{path.name}: cannot be read as UTF-8 text") from None


def _named_templates(value: object, file: str) -> dict[str, str]:
    """A template is a string, a list of ``{"name", "template"}``, or an object name -> template."""
    if value is None or isinstance(value, str):
        return {"default": value} if value else {}
    entries: list[tuple[object, object]] = []
    if isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = [(e.get("name"), e.get("template")) for e in value if isinstance(e, Mapping)]
    sources = {name: source for name, source in entries if isinstance(name, str) and isinstance(source, str)}
    if not sources or len(sources) != len(value):  # type: ignore[arg-type]
        raise ModelFileError(f"{file}: chat_template is neither a template nor a list of named templates")
    return sources


def _gguf_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    sources = {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if (key == prefix or key.startswith(prefix + ".")) and isinstance(value, str)
    }
    return dict(sorted(sources.items(), key=lambda item: item[0] != "default"))


# -- numbers -------------------------------------------------------------------------------------------


def _ids(value: object, file: str) -> Iterator[int]:
    """A token id, a list of them, or null."""
    for item in value if isinstance(value, list) else [value]:
        if item is None:
            continue
        if not isinstance(item, int) or isinstance(item, bool):
            raise ModelFileError(f"{file}: end token id {item!r} is not an integer")
        yield item


def _end_tokens(tokenizer: Tokenizer, declared: list[int]) -> frozenset[int]:
    own = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return frozenset(token_id for token_id in [*declared, *own] if 0 <= token_id < tokenizer.vocab_size)


def _refuse_foreign_tokenizer(end_token_ids: frozenset[int], vocab_size: object) -> None:
    """A model that can sample none of its end tokens was given another model's tokenizer."""
    if isinstance(vocab_size, int) and end_token_ids and min(end_token_ids) >= vocab_size:
        raise ModelFileError(
            f"tokenizer.json: not this model's: its end tokens are {sorted(end_token_ids)}, config.json names"
            f" {vocab_size} tokens (vocab_size)"
        )


def _checked_defaults(values: Mapping[str, object], file: str) -> dict[str, float | int]:
    defaults: dict[str, float | int] = {}
    for name, value in values.items():
        field, _, lowest, highest = _DEFAULTS[name]
        if value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not lowest <= value <= highest:
            if name == "top_k" and value == -1:  # some files write "off" so
                continue
            raise ModelFileError(f"{file}: {field} is {value!r}, not a number from {lowest} to {highest}")
        defaults[name] = int(value) if name == "top_k" else float(value)
    return defaults


def _max_length(config: Mapping[str, object], tokenizer_config: Mapping[str, object]) -> int | None:
    """Positions by config.json; where it has none, by the tokenizer (whose huge values mean "unknown")."""
    for field in ("max_position_embeddings", "max_sequence_length", "n_positions", "max_seq_len", "seq_length"):
        value = config.get(field)
        if isinstance(value, int) and value > 0:
            return value
    value = tokenizer_config.get("model_max_length")
    return int(value) if isinstance(value, (int, float)) and 0 < value < 1e9 else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
