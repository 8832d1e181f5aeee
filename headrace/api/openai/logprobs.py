"""Logprobs as the two OpenAI dialects show them, as plain data ready for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.gateway.events import ScoredToken


def chat_logprobs(tokens: Iterable[ScoredToken], as_ids: bool) -> dict[str, object]:
    """``{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}``."""
    content = [
        {**_entry(token, as_ids), "top_logprobs": [_entry(other, as_ids) for other in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken], offset: int, as_ids: bool) -> dict[str, object]:
    """The four parallel lists of the legacy form; ``offset`` is where the first token begins in the text."""
    text_offset: list[int] = []
    for token in tokens:
        text_offset.append(offset)
        offset += len(token.text)
    return {
        "tokens": [_name(token, as_ids) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [None if token.logprob is None else _by_name(token.top, as_ids) for token in tokens],
        "text_offset": text_offset,
    }


def prompt_logprobs(tokens: Iterable[ScoredToken]) -> list[dict[str, object] | None]:
    """vLLM's form: per prompt token, id -> {logprob, rank, decoded_token}; null for the first one.

    The rank of a token that is not among the most likely ones is not known and null.
    """
    result: list[dict[str, object] | None] = []
    for token in tokens:
        if token.logprob is None:
            result.append(None)
            continue
        entries = {str(other.token_id): _ranked(other, rank) for rank, other in enumerate(token.top, 1)}
        entries.setdefault(str(token.token_id), _ranked(token, None))
        result.append(dict(entries))
    return result


def _entry(token: ScoredToken, as_ids: bool) -> dict[str, object]:
    return {"token": _name(token, as_ids), "logprob": token.logprob, "bytes": list(token.data)}


def _name(token: ScoredToken, as_ids: bool) -> str:
    return f"token_id:{token.token_id}" if as_ids else token.text


def _by_name(tokens: Iterable[ScoredToken], as_ids: bool) -> dict[str, float | None]:
    """Different tokens may have one text; the later one is then named by its id, so that none is lost."""
    result: dict[str, float | None] = {}
    for token in tokens:
        name = _name(token, as_ids)
        result[f"token_id:{token.token_id}" if name in result else name] = token.logprob
    return result


def _ranked(token: ScoredToken, rank: int | None) -> dict[str, object]:
    return {"logprob": token.logprob, "rank": rank, "decoded_token": token.text}
