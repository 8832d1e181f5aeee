"""Stored responses: one SQLite file, bounded, shared by all servers of a user, each key seeing only its own.

A row is one response with its own input; the conversation before it is found by following ``previous``. When the
file's content grows over its bound, what was not used for longest goes; using a response uses all before it. The
file is opened with the first use, and several processes may share it.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import StartupError
from headrace.files import state_folder

_FILE = "responses.sqlite3"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, previous TEXT, used_at REAL NOT NULL, size INTEGER NOT NULL,
    response BLOB NOT NULL, input BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON responses (used_at, size);
"""
_CHAIN = """
WITH RECURSIVE chain (depth, id, previous, response, input) AS (
    SELECT 0, id, previous, response, input FROM responses WHERE id = :id AND key = :key
    UNION ALL
    SELECT depth + 1, r.id, r.previous, r.response, r.input
    FROM chain JOIN responses r ON r.id = chain.previous AND r.key = :key
)
SELECT id, previous, response, input FROM chain ORDER BY depth DESC
"""
_LOCK_WAIT_S = 5.0
_EVICT_ROWS = 64


class StoredResponse(msgspec.Struct, frozen=True):
    """A response as JSON, and the items that were its own input."""

    response: bytes
    input: list[dict[str, Any]]


class ResponseStore:
    """Blocking; call it in a thread.

    Raises ``sqlite3.Error``, ``OSError`` or StartupError when the file cannot be used.

    Args:
        file: None: in the user's state folder.
        limit_bytes: of all stored JSON; 0: nothing is stored or found.
    """

    def __init__(self, file: str | None, limit_bytes: int) -> None:
        self._file = file
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None

    @property
    def is_on(self) -> bool:
        return self._limit_bytes > 0

    def check(self) -> None:
        """Raises StartupError when a file that was named cannot be used."""
        if self._file is None or not self.is_on:
            return
        try:
            with self._transaction():
                pass
        except (sqlite3.Error, OSError) as error:
            raise StartupError(f"--response-store-file {self._file} cannot be used: {error}") from None

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            self._drop()

    def put(self, response: dict[str, Any], items: list[dict[str, Any]], previous: str | None, key: str) -> bool:
        """Store a finished response. False: it alone is larger than the bound."""
        body, given = msgspec.json.encode(response), msgspec.json.encode(items)
        size = len(body) + len(given)
        if size > self._limit_bytes:
            return False
        with self._transaction() as database:
            database.execute(
                "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                (response["id"], key, previous, time.time(), size, body, given),
            )
            self._evict(database)
        return True

    def get(self, response_id: str, key: str) -> StoredResponse | None:
        if not self.is_on:
            return None
        with self._transaction() as database:
            row = database.execute(
                "SELECT response, input FROM responses WHERE id = ? AND key = ?", (response_id, key)
            ).fetchone()
        return None if row is None else StoredResponse(row[0], msgspec.json.decode(row[1]))

    def conversation(self, response_id: str, key: str) -> list[dict[str, Any]] | None:
        """Items of a response and all before it, oldest first; None when one of them is not stored (any more)."""
        if not self.is_on:
            return None
        with self._transaction() as database:
            rows = database.execute(_CHAIN, {"id": response_id, "key": key}).fetchall()
        if not rows or rows[0][1] is not None:
            return None
        now = time.time()
        with suppress(sqlite3.Error), self._transaction() as database:  # a full disk can still be read
            database.executemany("UPDATE responses SET used_at = ? WHERE id = ?", [(now, row[0]) for row in rows])
        items: list[dict[str, Any]] = []
        for _, _, response, given in rows:
            items += msgspec.json.decode(given)
            items += msgspec.json.decode(response)["output"]
        return items

    def delete(self, response_id: str, key: str) -> bool:
        """Remove a response and its input; False when there is none. Those that follow it lose their beginning."""
        if not self.is_on:
            return False
        with self._transaction() as database:
            found = database.execute("DELETE FROM responses WHERE id = ? AND key = ?", (response_id, key))
            return found.rowcount > 0

    def _evict(self, database: sqlite3.Connection) -> None:
        while True:
            (total,) = database.execute("SELECT coalesce(sum(size), 0) FROM responses").fetchone()
            excess = total - self._limit_bytes
            if excess <= 0:
                return
            oldest = database.execute("SELECT id, size FROM responses ORDER BY used_at LIMIT ?", (_EVICT_ROWS,))
            for row_id, size in oldest.fetchall():
                database.execute("DELETE FROM responses WHERE id = ?", (row_id,))
                excess -= size
                if excess <= 0:
                    break

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._database is None:
                self._database = self._open()
            try:
                with self._database:
                    yield self._database
            except sqlite3.Error:
                self._drop()
                raise

    def _open(self) -> sqlite3.Connection:
        path = Path(self._file) if self._file is not None else state_folder() / _FILE
        path.touch(mode=0o600)
        database = sqlite3.connect(path, timeout=_LOCK_WAIT_S, check_same_thread=False)
        try:
            # Answers survive the process's death at every commit, the machine's at every checkpoint.
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA secure_delete = ON")
            database.executescript(_SCHEMA)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _drop(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
