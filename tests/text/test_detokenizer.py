"""Incremental detokenization (cases B41, B44, B50): any split gives the whole text, no half characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import scripted
from tiny_vocabularies import KINDS

from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.tokenizer import Tokenizer

TOKENIZERS = {name: make() for name, make in KINDS.items()}
ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30)

every_kind = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    for token_id in range(tokenizer.vocab_size):
        if not tokenizer.is_added(token_id) and tokenizer.token_bytes(token_id) == bytes([byte]):
            return token_id
    raise AssertionError(f"no token for byte {byte}")


BYTES = {name: [byte_token(tokenizer, byte) for byte in range(256)] for name, tokenizer in TOKENIZERS.items()}


@every_kind
@settings(max_examples=40)
@given(data=st.data())
def test_any_token_sequence_streams_to_its_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    for skip in (True, False):
        for at_start in (True, False):
            stream = IncrementalDetokenizer(tokenizer, skip, at_start)
            assert stream.decode_all(ids) == tokenizer.decode(ids, skip_special=skip, at_start=at_start)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40)
@given(text=ANY_TEXT)
def test_bytes_one_by_one_give_whole_characters(name: str, text: str) -> None:
    stream = IncrementalDetokenizer(TOKENIZERS[name])
    pushed = [stream.push(BYTES[name][byte]) for byte in text.encode()]
    assert "".join(pushed) == text
    assert all(len(piece) <= 1 and piece != "\ufffd" for piece in pushed)
    assert stream.flush() == ""


@every_kind
@settings(max_examples=40)
@given(text=ANY_TEXT)
def test_an_answer_keeps_its_leading_space(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(" " + text, parse_special=False, add_bos=False)
    assert IncrementalDetokenizer(tokenizer).decode_all(ids).startswith(" ")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_unfinished_character_is_one_replacement(name: str) -> None:
    stream = IncrementalDetokenizer(TOKENIZERS[name])
    pushed = [stream.push(BYTES[name][byte]) for byte in b"x \xf0\x9f\x98"]
    assert "".join(pushed) == "x "
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_broken_bytes_are_replaced_at_once(name: str) -> None:
    stream = IncrementalDetokenizer(TOKENIZERS[name])
    pushed = [stream.push(BYTES[name][byte]) for byte in b"\xf0a\xffb"]
    assert pushed == ["", "\ufffda", "\ufffd", "b"]


@pytest.mark.parametrize("script", scripted.SCRIPTS)
def test_scripts(script: str, scripted_text: Tokenizer) -> None:
    words = scripted.vocabulary()
    ids = [words.ids[piece] for piece in scripted.expected_pieces(script, 20)]
    stream = IncrementalDetokenizer(scripted_text)
    pushed = [stream.push(token_id) for token_id in ids]
    # The end token has no text; nothing is taken back.
    pushed.append(stream.push(words.added["<|im_end|>"]))
    assert not any("\ufffd" in piece or "<|im_end|>" in piece for piece in pushed)
    assert "".join(pushed) + stream.flush() == scripted.expected_text(script, 20)


def test_special_tokens_show_when_asked(scripted_text: Tokenizer) -> None:
    end = scripted.vocabulary().added["<|im_end|>"]
    assert IncrementalDetokenizer(scripted_text, skip_special=False).push(end) == "<|im_end|>"
