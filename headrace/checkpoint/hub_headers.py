"""A hub model's headers without its weights: enough to inspect it before fetching gigabytes.

Configuration files are fetched into a temporary folder. Of every weight file only the header is read; a sparse
file of the same tensors stands in for it, so that everything that reads headers works unchanged.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.checkpoint.hub import FetchOptions, fetch_companions, list_repository, reason
from headrace.checkpoint.safetensors_file import is_plain_name
from headrace.errors import ModelFileError, StartupError


@contextmanager
def remote_folder(hub_id: str, options: FetchOptions | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A temporary folder that describes as ``hub_id`` does, and its source, revision and file sizes."""
    options = options or FetchOptions()
    with tempfile.TemporaryDirectory(prefix="headrace-inspect-") as name:
        folder = Path(name)
        listing = list_repository(hub_id, options)
        index = fetch_companions(hub_id, listing, folder, options)
        weights = listing.weights(sorted(set(index.values())) if index else None)
        for file in weights:
            if not file.name.endswith(".safetensors"):
                raise ModelFileError(f"{file.name}: a GGUF file is inspected after `model acquire {hub_id}`")
            _stand_in(hub_id, listing.revision, file.name, folder)
        sizes = {file.name: file.size for file in weights}
        yield folder, {"source": hub_id, "revision": listing.revision, "sizes": sizes}


def _stand_in(hub_id: str, revision: str, name: str, folder: Path) -> None:
    from huggingface_hub import HfApi

    assert is_plain_name(name)
    try:
        found = HfApi().parse_safetensors_file_metadata(hub_id, name, revision=revision)
    except Exception as error:  # the library's errors differ from version to version
        raise StartupError(f"{name}: {reason(hub_id, error)}") from None
    entries: dict[str, dict[str, Any]] = {
        tensor: {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": list(info.data_offsets)}
        for tensor, info in found.tensors.items()
    }
    header = json.dumps(entries).encode()
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    with (folder / name).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
