"""Which blocks of one pool hold which prefixes: the lookup side of the prefix cache.

A full block is found by its digest: a 128-bit hash of (the parent block's digest, its own token ids), where the
first block's parent is a digest of the request's cache salt. The parent in the hash is what makes a block valid
only at its place. A hit is verified against the stored parent and token ids, not trusted. All blocks, full
or partial, are also children of their parent's digest, so that a lookup finds the one that shares the most
leading tokens with a prompt that diverges, or ends, inside a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

MAX_CHILDREN_SEEN = 32  # newest first: bounds a lookup under a prefix with very many continuations


def root_digest(salt: str) -> bytes:
    """Parent digest of a sequence's first block; different salts never share blocks."""
    return blake2b(b"headrace" + salt.encode(), digest_size=16).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a full block behind ``parent``; token ids fit 32 bits."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


class BlockContent(NamedTuple):
    """What a findable block holds: the KV of ``token_ids`` behind the prefix ``parent``."""

    parent: bytes
    token_ids: tuple[int, ...]
    digest: bytes | None  # of a full block; None: a partial one


class PrefixIndex:
    """Contents of the findable blocks of one pool."""

    def __init__(self) -> None:
        self._content: dict[int, BlockContent] = {}
        self._by_digest: dict[bytes, int] = {}
        self._children: dict[tuple[bytes, int], dict[int, None]] = {}  # by parent and first token, oldest first

    def __contains__(self, block: int) -> bool:
        return block in self._content

    def __len__(self) -> int:
        return len(self._content)

    def full_block(self, parent: bytes, token_ids: tuple[int, ...], digest: bytes) -> int | None:
        """The block that holds exactly these tokens behind ``parent``; ``digest`` is theirs."""
        block = self._by_digest.get(digest)
        if block is None:
            return None
        content = self._content[block]
        return block if content.token_ids == token_ids and content.parent == parent else None

    def has_digest(self, digest: bytes) -> bool:
        return digest in self._by_digest

    def longest_child(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Block behind ``parent`` with the most leading tokens in common, and how many (at least one)."""
        best: tuple[int, int] | None = None
        for block in self._newest_children(parent, token_ids):
            common = _common_prefix(self._content[block].token_ids, token_ids)
            if best is None or common > best[1]:
                best = block, common
            if common == len(token_ids):
                break
        return best

    def add(self, block: int, content: BlockContent) -> bool:
        """Make a block findable; False, and nothing changes, when what it holds can already be found."""
        if content.digest is not None:
            if content.digest in self._by_digest:
                return False
            self._by_digest[content.digest] = block
        else:
            found = self.longest_child(content.parent, content.token_ids)
            if found is not None and found[1] == len(content.token_ids):
                return False
        self._content[block] = content
        self._children.setdefault((content.parent, content.token_ids[0]), {})[block] = None
        return True

    def superseded_by(self, content: BlockContent) -> list[int]:
        """Partial blocks whose tokens are a beginning of ``content``'s: of no use once that is findable."""
        if (content.parent, content.token_ids[0]) not in self._children:
            return []
        size = len(content.token_ids)
        return [
            block
            for block in self._newest_children(content.parent, content.token_ids)
            if len(self._content[block].token_ids) < size
            and self._content[block].token_ids == content.token_ids[: len(self._content[block].token_ids)]
        ]

    def discard(self, block: int) -> None:
        """Make a block unfindable, if it is findable."""
        content = self._content.pop(block, None)
        if content is None:
            return
        if content.digest is not None:
            del self._by_digest[content.digest]
        key = content.parent, content.token_ids[0]
        siblings = self._children[key]
        del siblings[block]
        if not siblings:
            del self._children[key]

    def rename(self, moves: Mapping[int, int]) -> None:
        """Blocks were copied elsewhere: old id -> new id, which nothing findable has."""

        def new(block: int) -> int:
            return moves.get(block, block)

        self._content = {new(block): content for block, content in self._content.items()}
        self._by_digest = {digest: new(block) for digest, block in self._by_digest.items()}
        self._children = {
            key: dict.fromkeys(new(block) for block in siblings) for key, siblings in self._children.items()
        }

    def _newest_children(self, parent: bytes, token_ids: Sequence[int]) -> Iterator[int]:
        children = self._children.get((parent, token_ids[0]), {}) if token_ids else {}
        return islice(reversed(children), MAX_CHILDREN_SEEN)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the three maps describe the same blocks."""
        children = [block for siblings in self._children.values() for block in siblings]
        if sorted(children) != sorted(self._content):
            raise RuntimeError("children of the prefix index are not its blocks")
        full = {content.digest: block for block, content in self._content.items() if content.digest is not None}
        if full != self._by_digest:
            raise RuntimeError("digests of the prefix index do not name its full blocks")
        for content in self._content.values():
            if content.digest not in (None, block_digest(content.parent, content.token_ids)):
                raise RuntimeError("a block's digest is not that of its tokens")


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
