"""The store of responses: bounded, private to a key, a conversation or nothing."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.api.responses.store import ResponseStore
from headrace.errors import StartupError


def response(name: str, size: int = 10) -> dict[str, Any]:
    return {"id": name, "output": [{"type": "message", "text": name + "!" * size}]}


def item(text: str) -> dict[str, Any]:
    return {"id": f"i{text}", "text": text}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResponseStore]:
    store = ResponseStore(str(tmp_path / "store"), 4000)
    yield store
    store.close()


def test_a_conversation_is_followed_back(store: ResponseStore) -> None:
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.put(response(name, 0), [item(name)], previous, "")
    found = store.conversation("c", "")
    assert found is not None
    assert [entry["text"] for entry in found] == ["a", "a", "b", "b", "c", "c"]
    assert store.delete("a", "")
    assert store.conversation("c", "") is None, "a conversation without its beginning is none"
    assert store.get("c", "") is not None
    assert not store.delete("a", "")


def test_keys_do_not_see_each_other(store: ResponseStore) -> None:
    store.put(response("a"), [], None, "ada")
    assert store.get("a", "bob") is None
    assert store.conversation("a", "bob") is None
    assert not store.delete("a", "bob")
    assert store.get("a", "ada") is not None


def test_the_bound_holds_and_what_is_used_stays(store: ResponseStore) -> None:
    store.put(response("kept", 500), [], None, "")
    for number in range(20):
        assert store.put(response(f"r{number}", 500), [], None, "")
        assert store.conversation("kept", "") is not None
    alive = [name for name in [f"r{n}" for n in range(20)] if store.get(name, "") is not None]
    assert 3 <= len(alive) <= 7
    assert alive[-1] == "r19"
    assert not store.put(response("huge", 5000), [], None, "")
    assert store.get("r19", "") is not None


def test_the_file_is_private_and_outlives_the_store(tmp_path: Path) -> None:
    file = tmp_path / "store"
    first = ResponseStore(str(file), 4000)
    first.put(response("a"), [item("x")], None, "")
    first.close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = ResponseStore(str(file), 4000).get("a", "")
    assert found is not None and found.input == [item("x")]


def test_a_store_that_is_off_finds_nothing(tmp_path: Path) -> None:
    store = ResponseStore(str(tmp_path / "store"), 0)
    assert store.get("a", "") is None and store.conversation("a", "") is None and not store.delete("a", "")
    assert not (tmp_path / "store").exists()


def test_a_named_file_that_cannot_be_used_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="response-store-file"):
        ResponseStore(str(tmp_path / "missing" / "store"), 4000).check()
    (tmp_path / "text").write_text("not a database, but long enough to be read as one" * 20)
    with pytest.raises(StartupError, match="response-store-file"):
        ResponseStore(str(tmp_path / "text"), 4000).check()


def test_what_cannot_be_written_to_can_be_read(store: ResponseStore) -> None:
    """A full disk, say: what was stored is found, although when it was used cannot be noted."""
    store.put(response("a"), [item("x")], None, "")
    assert store._database is not None
    store._database.execute("PRAGMA query_only = ON")
    assert store.conversation("a", "") == [item("x"), *response("a")["output"]]
    found = store.get("a", "")
    assert found is not None and found.input == [item("x")]
