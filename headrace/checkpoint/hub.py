"""Models from a hub: fetched into a staging folder, verified, then moved under their final name.

    ``.NAME.partial/``  beside the target: whole files under their names, a file on its way as ``NAME.part``
    ``NAME/``           the model; appears by one rename when every file has the size and hash of the listing

The listing is read first and everything is fetched from the commit that it names. The index is fetched before the
weights, so that exactly the shards it names are. A staging folder that was left behind is continued: finished
files are verified again, a ``.part`` goes on by a range request. The staging folder itself is the lock: a second
process waits for the first and then finds the model in place.

Network access goes through ``huggingface_hub``: its endpoint (HF_ENDPOINT), token (HF_TOKEN), proxies, timeouts.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.checkpoint.hub_listing import Listing, RemoteFile, read_listing
from headrace.checkpoint.safetensors_file import WeightFiles, read_folder_tensors, read_index
from headrace.errors import HeadraceError, ModelFileError, StartupError
from headrace.files import cache_folder

RECORD: Final = ".headrace.json"
LISTING_TIMEOUT_S: Final = 8.0
CHUNK_BYTES: Final = 64 * 1024
_HUB_ID: Final = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$", re.ASCII)

Progress = Callable[[str, int, int], None]
"""Called with (file name, bytes so far of all files, bytes of all files)."""


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """How to fetch: which revision (None: the default branch), how often a broken transfer is taken up again."""

    revision: str | None = None
    offline: bool = False
    timeout_s: float = 30.0
    retries: int = 3


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the shape ``owner/model``."""
    return bool(_HUB_ID.match(name)) and ".." not in name


def staging_folder(target: Path) -> Path:
    """Where a download to ``target`` is gathered."""
    return target.with_name(f".{target.name}.partial")


def read_record(folder: Path) -> dict[str, Any]:
    """What was fetched into ``folder`` (``source``, ``revision``, ``files``); empty for other folders."""
    try:
        content = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def ensure_local(model: str, options: FetchOptions | None = None, progress: Progress | None = None) -> Path:
    """Path on this machine of the model that ``model`` names: a path as it is, a hub id fetched into the cache.

    Raises StartupError (one line) when there is nothing by that name or it cannot be fetched.
    """
    options = options or FetchOptions()
    if not model.strip():
        raise ModelFileError("the model's name is empty: give a folder, a .gguf file or a hub id")
    path = Path(model).expanduser()
    if exists(path):
        return path
    if staging_folder(path).exists() and path.name:
        raise ModelFileError(
            f"{model}: incomplete: its download did not finish; run `headrace model acquire` again"
        )
    if not is_hub_id(model) or Path(model.split("/")[0]).is_dir():
        raise ModelFileError(f"{model}: no such file or folder, and not a hub id (owner/model)")
    target = cached_target(model, options)
    if not target.exists():
        if options.offline:
            raise StartupError(f"{model} is not on this machine, and fetching is off (--offline)")
        acquire(model, target, options, progress)
    return _entry(target)


def exists(path: Path) -> bool:
    """Raises ModelFileError where that cannot be seen (a folder above may not be entered)."""
    try:
        return path.exists()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None


def cached_target(hub_id: str, options: FetchOptions) -> Path:
    """Where ``hub_id`` lies, or would lie, in the cache folder."""
    if not is_hub_id(hub_id):
        raise ModelFileError(f"{hub_id}: not a hub id (owner/model)")
    name = hub_id.replace("/", "--")
    if options.revision:
        name += "@" + re.sub(r"[^\w.-]", "-", options.revision)
    return cache_folder("models") / name


def _entry(folder: Path) -> Path:
    """What to serve: the folder, or the only ``.gguf`` file of a repository without safetensors."""
    found = sorted(folder.glob("*.gguf"))
    return found[0] if len(found) == 1 and not any(folder.glob("*.safetensors")) else folder


def acquire(
    hub_id: str, target: Path, options: FetchOptions | None = None, progress: Progress | None = None
) -> Path:
    """Fetch ``hub_id`` to the folder ``target``; returns what to serve (the folder or a ``.gguf`` in it).

    A target that was fetched from the same place before is left as it is. Raises StartupError or ModelFileError,
    each one line; then nothing is under the final name, and what was fetched waits in the staging folder.
    """
    options = options or FetchOptions()
    if not is_hub_id(hub_id):
        raise ModelFileError(f"{hub_id}: not a hub id (owner/model)")
    target = Path(os.path.abspath(target.expanduser()))
    try:
        with _held_staging(hub_id, target, options) as staging:
            if staging is not None:
                _fetch_all(hub_id, staging, options, progress)
                if target.is_dir():
                    target.rmdir()  # was empty when we looked; a rename does not replace it on every system
                os.rename(staging, target)
    except OSError as error:
        raise StartupError(_osreason(error, target)) from None
    return _entry(target)


# -- staging -------------------------------------------------------------------------------------------


@contextmanager
def _held_staging(hub_id: str, target: Path, options: FetchOptions) -> Iterator[Path | None]:
    """The staging folder, locked; None when ``target`` already is what was asked for."""
    staging = staging_folder(target)
    while True:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            _check_same(hub_id, target, options)
            yield None
            return
        staging.mkdir(parents=True, exist_ok=True)
        handle = os.open(staging, os.O_RDONLY)
        try:
            _lock(handle, staging)
            if _is_at(handle, staging):
                try:
                    yield staging
                finally:
                    _remove_if_empty(staging)
                return
        finally:
            os.close(handle)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _lock(handle: int, staging: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another process that is fetching to {staging.parent}", file=sys.stderr)
        fcntl.flock(handle, fcntl.LOCK_EX)


def _is_at(handle: int, path: Path) -> bool:
    """Whether ``path`` still is the folder behind ``handle`` (whoever held the lock may have renamed it)."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(handle)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _check_same(hub_id: str, target: Path, options: FetchOptions) -> None:
    record = read_record(target)
    if record.get("source") != hub_id:
        raise ModelFileError(f"{target}: exists and was not fetched from {hub_id}; name another --target-dir")
    if options.revision not in (None, record.get("revision"), record.get("asked")):
        raise ModelFileError(
            f"{target}: holds revision {str(record.get('revision'))[:12]}, not {options.revision}; "
            "name another --target-dir"
        )


# -- fetching ------------------------------------------------------------------------------------------


def _fetch_all(hub_id: str, staging: Path, options: FetchOptions, progress: Progress | None) -> None:
    listing = list_repository(hub_id, options)
    companions = listing.companions()
    fetched = _Fetched(progress, sum(file.size for file in companions))
    index = fetch_companions(hub_id, listing, staging, options, fetched)
    weights = listing.weights(sorted(set(index.values())) if index else None)
    fetched.total += sum(file.size for file in weights)
    _check_space(staging, weights)
    for file in weights:
        _fetch(hub_id, listing.revision, file, staging, options, fetched)
    names = tuple(file.name for file in weights)
    if names[0].endswith(".safetensors"):
        read_folder_tensors(staging, WeightFiles(names, index))
    keep = {file.name for file in (*companions, *weights)}
    for stray in staging.iterdir():
        if stray.name not in keep:
            stray.unlink()
    _write_record(hub_id, staging, listing, options, [*companions, *weights])


def fetch_companions(
    hub_id: str, listing: Listing, folder: Path, options: FetchOptions, fetched: _Fetched | None = None
) -> dict[str, str] | None:
    """Bring everything but the weights into ``folder``; returns the index of sharded weights, if there is one."""
    fetched = fetched or _Fetched(None, 0)
    for file in listing.companions():
        _fetch(hub_id, listing.revision, file, folder, options, fetched)
    index_file = listing.index()
    return read_index(folder / index_file.name) if index_file else None


class _Fetched:
    """Bytes of all files together, for the progress display."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress = progress
        self.total = total
        self.done = 0

    def show(self, name: str, of_this_file: int) -> None:
        if self.progress is not None:
            self.progress(name, self.done + of_this_file, self.total)


class _CountingFile:
    """The file that ``http_get`` writes to, with its position shown as progress."""

    def __init__(self, file: Any, name: str, fetched: _Fetched) -> None:
        self._file = file
        self._name = name
        self._fetched = fetched

    def write(self, data: bytes) -> int:
        written: int = self._file.write(data)
        self._fetched.show(self._name, self._file.tell())
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def list_repository(hub_id: str, options: FetchOptions) -> Listing:
    """The files of one commit of ``hub_id``; StartupError (one line) when the hub does not say."""
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", str(max(1, int(options.timeout_s))))
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(
            hub_id, revision=options.revision, files_metadata=True, timeout=LISTING_TIMEOUT_S
        )
    except Exception as error:  # the library's network errors differ from version to version
        raise StartupError(reason(hub_id, error)) from None
    return read_listing(info)


def _fetch(
    hub_id: str, revision: str, file: RemoteFile, staging: Path, options: FetchOptions, fetched: _Fetched
) -> None:
    """Bring one file into ``staging`` and verify it; a verified one that is there already is kept."""
    final, part = staging / file.name, staging / f"{file.name}.part"
    if not (final.exists() and file.fault(final) is None):
        final.unlink(missing_ok=True)
        resumed = part.exists() and part.stat().st_size > 0
        _transfer(hub_id, revision, file, part, options, fetched)
        fault = file.fault(part)
        if fault is not None and resumed:  # the beginning that an earlier run left was not this file's
            part.unlink()
            _transfer(hub_id, revision, file, part, options, fetched)
            fault = file.fault(part)
        if fault is not None:
            part.unlink()
            raise ModelFileError(f"{file.name}: {fault}; what was received is discarded, try again")
        os.replace(part, final)
    fetched.done += file.size
    fetched.show(file.name, 0)


def _transfer(
    hub_id: str, revision: str, file: RemoteFile, part: Path, options: FetchOptions, fetched: _Fetched
) -> None:
    import huggingface_hub
    from huggingface_hub.file_download import http_get

    utils: Any = huggingface_hub.utils
    _prepare(huggingface_hub)
    headers = utils.build_hf_headers()
    url = huggingface_hub.hf_hub_url(hub_id, file.name, revision=revision)
    attempt = 0
    while True:
        part.touch()
        if part.stat().st_size > file.size:
            os.truncate(part, 0)
        with part.open("r+b") as out:
            start = out.seek(0, os.SEEK_END)
            counting: Any = _CountingFile(out, file.name, fetched)
            try:
                http_get(url, counting, resume_size=start, headers=headers, expected_size=file.size)
                return
            except Exception as error:  # see list_repository
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                out.flush()
                progressed = part.stat().st_size > start
                if attempt >= options.retries or not (progressed or _is_transient(error)):
                    raise StartupError(f"{file.name}: {reason(hub_id, error)}") from None
        attempt += 1
        time.sleep(min(2.0**attempt / 4, 5.0))


def _prepare(library: Any) -> None:
    """The library's own progress bars and retry messages off: this module reports both.

    It hands on what it received in pieces of 10 MB; a process that is killed should lose less than that.
    """
    library.utils.disable_progress_bars()
    library.utils.logging.set_verbosity_error()
    library.constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES


def _check_space(staging: Path, weights: list[RemoteFile]) -> None:
    sizes = {path.name.removesuffix(".part"): path.stat().st_size for path in staging.iterdir()}
    needed = sum(max(0, file.size - sizes.get(file.name, 0)) for file in weights)
    free = shutil.disk_usage(staging).free
    if needed > free:
        raise StartupError(
            f"disk full: the weights need {needed / 1e6:,.1f} MB more, {free / 1e6:,.1f} MB are free there"
        )


def _write_record(
    hub_id: str, staging: Path, listing: Listing, options: FetchOptions, files: list[RemoteFile]
) -> None:
    record = {
        "source": hub_id,
        "revision": listing.revision,
        "asked": options.revision,
        "files": {file.name: {"size": file.size, "sha256": file.sha256} for file in files},
    }
    (staging / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for path in staging.iterdir():
        with path.open("rb") as written:
            os.fsync(written.fileno())


# -- errors --------------------------------------------------------------------------------------------


def _is_transient(error: BaseException) -> bool:
    """Broken connections and timeouts; answers with a status are final (the library retries 429 itself)."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(
        names & {"TransportError", "ConnectionError", "Timeout", "TimeoutException", "ChunkedEncodingError"}
    )


def reason(hub_id: str, error: Exception) -> str:
    """One line for a person. The library's errors are told apart by name: their modules move between versions."""
    if isinstance(error, HeadraceError):
        return str(error)
    names = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in names:
        return f"{hub_id} is gated: accept its terms on the hub and set HF_TOKEN"
    if "RepositoryNotFoundError" in names:
        return f"{hub_id} is not on the hub, or private: check the name, or set HF_TOKEN"
    if "RevisionNotFoundError" in names:
        return f"{hub_id} has no such revision"
    if "OfflineModeIsEnabled" in names:
        return f"{hub_id} is not on this machine, and HF_HUB_OFFLINE is set"
    if "TooManyRedirects" in names:
        return "the server redirects in a circle"
    if "HfHubHTTPError" in names:
        status = getattr(getattr(error, "response", None), "status_code", None)
        return f"the hub answered with status {status}"
    if names & {"TimeoutException", "Timeout", "TimeoutError"}:
        return "the hub did not answer in time"
    if names & {"TransportError", "ConnectionError", "OSError"}:
        return f"the hub cannot be reached or the transfer broke off ({' '.join(str(error).split())[:160]})"
    return f"the hub's answer cannot be used ({' '.join(str(error).split())[:160]})"


def _osreason(error: OSError, target: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(target.parent).free if target.parent.exists() else 0
        return f"disk full while fetching to {target.parent} ({free / 1e6:,.1f} MB free)"
    return f"{target}: {error.strerror or error}"
