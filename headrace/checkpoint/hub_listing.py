"""What a hub repository holds, and which of its files a model needs.

Names come from a server and are not trusted: one that would leave the target folder refuses the whole listing.
Only files at the top level are taken: configuration, tokenizer, template, licence, and the weights that
``safetensors_file`` would choose.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from headrace.checkpoint.safetensors_file import choose_names, index_name, is_plain_name
from headrace.errors import ModelFileError

MAX_FILES: Final = 1000
_COMPANIONS: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*", "README.md")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a listing.

    Attributes:
        name: plain file name.
        size: bytes.
        sha256: of the content, for files in large-file storage.
        git_sha1: git's blob id of the content, for the others.
    """

    name: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None

    def fault(self, path: Path) -> str | None:
        """What is wrong with the file at ``path``, or None when size and hash are those of the listing."""
        size = path.stat().st_size
        if size != self.size:
            return f"incomplete: {size} bytes, the listing says {self.size}"
        expected, digest = self.sha256, hashlib.sha256()
        if expected is None:
            expected, digest = self.git_sha1, hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        if expected is None:
            return None
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return None if digest.hexdigest() == expected else f"wrong content: its hash is not {expected[:12]}…"


@dataclass(frozen=True, slots=True)
class Listing:
    """Files of one commit of a repository."""

    revision: str
    files: dict[str, RemoteFile]

    def companions(self) -> list[RemoteFile]:
        """Everything but weights, the index included."""
        wanted = [
            file for name, file in self.files.items() if any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)
        ]
        if len(wanted) > MAX_FILES:
            raise ModelFileError(f"the repository lists {len(wanted)} files to fetch, {MAX_FILES} are allowed")
        return wanted

    def index(self) -> RemoteFile | None:
        """The index of sharded weights, if there is one."""
        name = index_name(sorted(self.files))
        return None if name is None else self.files[name]

    def weights(self, shards: list[str] | None) -> list[RemoteFile]:
        """The weight files: ``shards`` where an index names them, else by the rule for folders without one."""
        if shards is None:
            found = [name for name in sorted(self.files) if name.endswith(".safetensors")]
            shards = choose_names(found) if found else [self._only_gguf()]
        if len(shards) > MAX_FILES:
            raise ModelFileError(f"the index names {len(shards)} files, {MAX_FILES} are allowed")
        for name in shards:
            if name not in self.files:
                raise ModelFileError(f"{name}: incomplete: the index names it, the repository does not have it")
        return [self.files[name] for name in shards]

    def _only_gguf(self) -> str:
        found = [name for name in sorted(self.files) if name.endswith(".gguf")]
        if len(found) == 1:
            return found[0]
        if not found:
            raise ModelFileError("the repository has no .safetensors and no .gguf file")
        raise ModelFileError(f"the repository has {len(found)} .gguf files ({found[0]} …): fetch one and name it")


def read_listing(info: Any) -> Listing:
    """The listing in a ``huggingface_hub`` ModelInfo with file metadata; ModelFileError for unsafe names."""
    files = {}
    for entry in info.siblings or []:
        name = entry.rfilename
        if not _is_safe(name):
            raise ModelFileError(f"the repository lists a file called {name!r}: unsafe, nothing was fetched")
        if not is_plain_name(name):
            continue
        if not isinstance(entry.size, int):
            raise ModelFileError(f"{name}: the repository's listing gives no size")
        large = entry.lfs
        sha256 = (large.get("sha256") if isinstance(large, dict) else large.sha256) if large else None
        files[name] = RemoteFile(name, entry.size, sha256, None if sha256 else entry.blob_id)
    if not info.sha:
        raise ModelFileError("the repository's listing names no commit")
    return Listing(info.sha, files)


def _is_safe(name: object) -> bool:
    """A relative path that stays below the folder it is joined to."""
    if not isinstance(name, str) or "\0" in name or "\\" in name:
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))
