"""Who shares prefixes with whom, seen only through ``usage``: by key, by salt, and by both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.client import Client
from support.server import Serve

from headrace.gateway.pipeline import key_salt

KEYS = ("--api-key", "alice:secret-a", "--api-key", "bob:secret-b")
PROMPT_TOKENS = 204


@given(st.text(), st.text(), st.text(), st.text())
def test_two_pairs_never_have_one_salt(key: str, salt: str, other_key: str, other_salt: str) -> None:
    same = (key, salt) == (other_key, other_salt)
    assert (key_salt(key, salt) == key_salt(other_key, other_salt)) is same


@pytest.fixture
def callers(request: pytest.FixtureRequest, serve: Serve) -> Iterator[tuple[Client, Client]]:
    """Alice and Bob at one server that isolates as the test's parameter says."""
    server = serve("plain", *KEYS, "--prefix-isolation", request.param, key="secret-a")
    bob = Client(server.url, server.model, "secret-b")
    yield server.client, bob
    bob.close()


def cached(client: Client, mark: str, **fields: str) -> int:
    """Cached tokens of a prompt that begins with ``mark``; the answer must be right, whatever was reused."""
    dots = "." * (PROMPT_TOKENS - 2 - len(mark))
    answer = client.complete(f"{mark}<|s05|>{dots}<|assistant|>", **fields)
    assert answer.text() == "ABCDEFGH"
    assert answer.usage["prompt_tokens"] == PROMPT_TOKENS
    return answer.cached_tokens


@pytest.mark.slow
@pytest.mark.parametrize("callers", ["key"], indirect=True)
def test_keys_share_with_themselves_only(callers: tuple[Client, Client]) -> None:
    alice, bob = callers
    assert cached(alice, "one") == 0
    assert cached(alice, "one") == PROMPT_TOKENS - 1
    assert cached(bob, "one") == 0
    assert cached(bob, "one") == cached(alice, "one") == PROMPT_TOKENS - 1


@pytest.mark.slow
@pytest.mark.parametrize("callers", ["key"], indirect=True)
def test_a_salt_divides_a_key_further_and_joins_no_two_keys(callers: tuple[Client, Client]) -> None:
    alice, bob = callers
    assert cached(alice, "two", cache_salt="s") == 0
    assert cached(alice, "two") == cached(bob, "two", cache_salt="s") == cached(bob, "two") == 0
    # a client that guesses how the server keeps keys apart gets nowhere
    assert cached(bob, "two", cache_salt=key_salt("alice", "s")) == 0
    assert cached(bob, "two", cache_salt=key_salt("alice", "")) == 0
    assert cached(alice, "two", cache_salt="s") == PROMPT_TOKENS - 1


@pytest.mark.slow
@pytest.mark.parametrize("callers", ["none"], indirect=True)
def test_without_isolation_only_salts_divide(callers: tuple[Client, Client]) -> None:
    alice, bob = callers
    assert cached(alice, "one") == 0
    assert cached(bob, "one") == PROMPT_TOKENS - 1
    assert cached(bob, "one", cache_salt="s") == 0
    assert cached(alice, "one", cache_salt="s") == PROMPT_TOKENS - 1
