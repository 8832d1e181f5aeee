"""Fetching models: complete or absent, resumed, verified, one line for every fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoint_files import CONFIG, write_checkpoint
from hub_server import REVISION, Repository, hub

from headrace.checkpoint import hub as hub_module
from headrace.checkpoint.hub import FetchOptions, acquire, ensure_local, read_record, staging_folder
from headrace.checkpoint.model_folder import describe
from headrace.errors import ModelFileError, StartupError

SHARD_2 = "model-00002-of-00003.safetensors"
ONCE = FetchOptions(retries=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**CONFIG, "vocab_size": 4000}  # a few 64 KB pieces per shard
    folder = write_checkpoint(tmp_path_factory.mktemp("source") / "model", config, shards=3)
    (folder / "README.md").write_text("a model")
    return folder


@pytest.fixture
def repository(checkpoint: Path) -> Repository:
    return Repository({path.name: path.read_bytes() for path in sorted(checkpoint.iterdir())})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Repository], str]]:
    """Serve a repository and point the hub library at it."""
    from contextlib import ExitStack

    from huggingface_hub import constants, hf_api

    with ExitStack() as stack:

        def start(repository: Repository) -> str:
            endpoint = stack.enter_context(hub(repository))
            monkeypatch.setattr(constants, "ENDPOINT", endpoint)
            monkeypatch.setattr(
                constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
            )
            monkeypatch.setattr(hf_api.constants, "ENDPOINT", endpoint)
            return endpoint

        yield start


def _nothing_but_staging(target: Path) -> bool:
    return not target.exists() and {path.name for path in target.parent.iterdir()} <= {staging_folder(target).name}


def test_a_fetched_model_is_whole_verified_and_recorded(
    repository: Repository, serve: Callable[[Repository], str], tmp_path: Path
) -> None:
    repository.files["consolidated.safetensors"] = b"never fetched"
    repository.files["original/params.json"] = b"{}"
    serve(repository)
    seen: list[tuple[int, int]] = []
    target = tmp_path / "models" / "it"
    assert acquire("owner/model", target, progress=lambda name, done, total: seen.append((done, total))) == target
    describe(target)
    assert (target / SHARD_2).read_bytes() == repository.files[SHARD_2]
    assert not (target / "consolidated.safetensors").exists()
    assert not any("consolidated" in path or "original" in path for path in repository.requests)
    assert read_record(target)["source"] == "owner/model"
    assert read_record(target)["revision"] == REVISION
    assert [path.name for path in target.parent.iterdir()] == ["it"]
    assert seen[-1][0] == seen[-1][1]
    assert all(done <= total for done, total in seen)


def test_asking_again_fetches_nothing(
    repository: Repository, serve: Callable[[Repository], str], tmp_path: Path
) -> None:
    serve(repository)
    acquire("owner/model", tmp_path / "it")
    requests = len(repository.requests)
    assert acquire("owner/model", tmp_path / "it") == tmp_path / "it"
    assert len(repository.requests) == requests
    with pytest.raises(ModelFileError, match="holds revision"):
        acquire("owner/model", tmp_path / "it", FetchOptions(revision="other"))
    with pytest.raises(ModelFileError, match="not fetched from owner/another"):
        acquire("owner/another", tmp_path / "it")


def test_a_token_is_sent(
    repository: Repository,
    serve: Callable[[Repository], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    serve(repository)
    acquire("owner/model", tmp_path / "it")
    assert repository.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize("fault", ["short", "html", "other content", "loop"])
def test_a_bad_answer_leaves_nothing_and_a_good_one_later_succeeds(
    repository: Repository, serve: Callable[[Repository], str], tmp_path: Path, fault: str
) -> None:
    repository.faults[SHARD_2] = fault
    serve(repository)
    target = tmp_path / "it"
    with pytest.raises(StartupError, match=SHARD_2) as caught:
        acquire("owner/model", target, ONCE)
    assert "\n" not in str(caught.value)
    assert _nothing_but_staging(target)
    with pytest.raises(ModelFileError, match="incomplete"):
        describe(target)
    with pytest.raises(ModelFileError, match="incomplete"):
        ensure_local(str(target))
    repository.faults.clear()
    describe(acquire("owner/model", target, ONCE))


def test_a_size_that_differs_from_the_listing_is_refused(
    repository: Repository, serve: Callable[[Repository], str], tmp_path: Path
) -> None:
    repository.listing_sizes[SHARD_2] = len(repository.files[SHARD_2]) + 7
    serve(repository)
    with pytest.raises(StartupError, match=SHARD_2):
        acquire("owner/model", tmp_path / "it", ONCE)
    assert _nothing_but_staging(tmp_path / "it")


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "nul\0.json", "back\\slash.json"])
def test_an_unsafe_name_refuses_the_listing(
    repository: Repository, serve: Callable[[Repository], str], tmp_path: Path, name: str
) -> None:
    repository.extra_names.append(name)
    serve(repository)
    with pytest.raises(ModelFileError, match="unsafe"):
        acquire("owner/model", tmp_path / "deep" / "it", ONCE)
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "deep" / "it").exists()
    assert not any("resolve" in path for path in repository.requests)


def test_an_index_that_names_a_file_outside_is_refused(
    repository: Repository, serve: Callable[[Repository], str], tmp_path: Path
) -> None:
    repository.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "../../evil.safetensors"}}'
    serve(repository)
    with pytest.raises(ModelFileError, match="weight_map"):
        acquire("owner/model", tmp_path / "it", ONCE)


def test_a_shard_that_the_repository_lacks_is_named(
    repository: Repository, serve: Callable[[Repository], str], tmp_path: Path
) -> None:
    del repository.files[SHARD_2]
    serve(repository)
    with pytest.raises(ModelFileError, match=f"{SHARD_2}: incomplete"):
        acquire("owner/model", tmp_path / "it", ONCE)


def test_ten_thousand_names_are_no_problem(
    repository: Repository, serve: Callable[[Repository], str], tmp_path: Path
) -> None:
    repository.extra_names += [f"samples/{index}.png" for index in range(10_000)]
    serve(repository)
    describe(acquire("owner/model", tmp_path / "it"))


def test_a_full_disk_is_said_before_the_weights(
    repository: Repository,
    serve: Callable[[Repository], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve(repository)
    full = type("Usage", (), {"free": 10})
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda path: full)
    with pytest.raises(StartupError, match="disk full"):
        acquire("owner/model", tmp_path / "it", ONCE)
    assert _nothing_but_staging(tmp_path / "it")


def test_unknown_repository_and_no_server(
    repository: Repository, serve: Callable[[Repository], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    serve(repository)
    with pytest.raises(StartupError, match="owner/none is not on the hub"):
        acquire("owner/none", tmp_path / "it", ONCE)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StartupError, match="cannot be reached"):
        acquire("owner/model", tmp_path / "it", ONCE)
    assert not any(tmp_path.iterdir())


def test_names_that_are_no_hub_ids() -> None:
    for name in ("nope", "./nope/none", "../../etc/nothing", "a/b/c", "owner/..", "-x/y"):
        with pytest.raises(ModelFileError, match="no such file or folder"):
            ensure_local(name)


def test_a_hub_id_is_fetched_once_into_the_cache(
    repository: Repository,
    serve: Callable[[Repository], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    serve(repository)
    with pytest.raises(StartupError, match="offline"):
        ensure_local("owner/model", FetchOptions(offline=True))
    path = ensure_local("owner/model")
    requests = len(repository.requests)
    assert ensure_local("owner/model", FetchOptions(offline=True)) == path
    assert len(repository.requests) == requests
    describe(path)


def test_the_only_gguf_of_a_repository_is_what_to_serve(
    serve: Callable[[Repository], str], tmp_path: Path
) -> None:
    serve(Repository({"weights.gguf": b"GGUF" + bytes(100), "README.md": b""}))
    assert acquire("owner/model", tmp_path / "it") == tmp_path / "it" / "weights.gguf"
    serve(Repository({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}))
    with pytest.raises(ModelFileError, match=r"2 \.gguf files"):
        acquire("owner/model", tmp_path / "other")


def _child(endpoint: str, target: Path) -> subprocess.Popen[str]:
    program = (
        "import sys; from pathlib import Path; from headrace.checkpoint.hub import acquire;"
        "acquire('owner/model', Path(sys.argv[1]))"
    )
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", program, str(target)], env=environment, stderr=subprocess.PIPE, text=True
    )


def test_killed_in_the_middle_then_resumed(
    repository: Repository, serve: Callable[[Repository], str], tmp_path: Path
) -> None:
    repository.slow_chunk, repository.gate = 4096, threading.Event()
    repository.faults[SHARD_2] = "stall after half"
    endpoint, target = serve(repository), tmp_path / "it"
    half = len(repository.files[SHARD_2]) // 2
    with _child(endpoint, target) as child:
        part = staging_folder(target) / f"{SHARD_2}.part"
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size >= half // 2):
            if time.monotonic() > deadline or child.poll() is not None:
                break
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
    have = part.stat().st_size
    assert half // 2 <= have <= half
    assert _nothing_but_staging(target)
    with pytest.raises(ModelFileError, match="incomplete"):
        describe(target)
    repository.faults.clear()
    repository.gate.set()
    time.sleep(0.1)
    repository.bytes_sent.clear()
    describe(acquire("owner/model", target))
    assert repository.bytes_sent == {
        SHARD_2: len(repository.files[SHARD_2]) - have,
        "model-00003-of-00003.safetensors": len(repository.files["model-00003-of-00003.safetensors"]),
    }


def test_two_at_once_the_second_waits(
    repository: Repository, serve: Callable[[Repository], str], tmp_path: Path
) -> None:
    repository.slow_chunk, repository.gate = 4096, threading.Event()
    repository.faults[SHARD_2] = "stall after half"
    endpoint, target = serve(repository), tmp_path / "it"
    children = [_child(endpoint, target) for _ in range(2)]
    threading.Timer(1.5, repository.gate.set).start()
    errors = [child.communicate(timeout=60)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], errors
    assert sum("waiting for another process" in error for error in errors) == 1
    assert repository.bytes_sent[SHARD_2] == len(repository.files[SHARD_2])
    describe(target)
