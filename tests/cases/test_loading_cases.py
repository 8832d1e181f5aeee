"""Model folders: incomplete, contradictory, littered, of another form; names of models; requests at start-up."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.client import ABSENT, HANG_S, Answer, at_once, chat_body
from support.scripted import SCRIPTS, expected_text
from support.server import MIB, Ended, Serve, Server, ServerRoom, await_ready

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
Copy = Callable[[str], Path]


@pytest.fixture
def copy(scripted_folder: Callable[[str], Path], tmp_path: Path) -> Copy:
    """``copy("sharded")``: a folder of that variant which the test may change."""

    def copied(variant: str) -> Path:
        return Path(shutil.copytree(scripted_folder(variant), tmp_path / f"{variant}{len(os.listdir(tmp_path))}"))

    return copied


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ABSENT}))


def check_refusal(ended: Ended, *names: str) -> None:
    """Not a success, one line that names what is at fault, nothing allocated by a file's word."""
    assert ended.code not in (0, -9), ended.output
    assert "Traceback" not in ended.output
    errors = [line for line in ended.output.splitlines() if "error" in line.lower() or "headrace" in line]
    assert len(errors) == 1, ended.output
    assert any(name in errors[0] for name in names), ended.output
    assert ended.peak_rss_bytes < 1024 * MIB


# -- incomplete folders


def without_a_shard(folder: Path) -> None:
    (folder / SHARD).unlink()


def with_an_empty_shard(folder: Path) -> None:
    (folder / SHARD).write_bytes(b"")


def with_a_cut_shard(folder: Path) -> None:
    with (folder / SHARD).open("r+b") as file:
        file.truncate((folder / SHARD).stat().st_size - 1)


@pytest.mark.parametrize("damage", [without_a_shard, with_an_empty_shard, with_a_cut_shard])
def test_an_incomplete_folder_is_refused(
    server_room: ServerRoom, copy: Copy, damage: Callable[[Path], None]
) -> None:
    folder = copy("sharded")
    damage(folder)
    ended = server_room.ends(str(folder), "--port", "0")
    check_refusal(ended, SHARD)
    assert "incomplete" in ended.output


def test_an_index_that_names_another_file_is_refused(server_room: ServerRoom, copy: Copy) -> None:
    folder = copy("sharded")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["more.weight"] = "model-00004-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    check_refusal(server_room.ends(str(folder), "--port", "0"), "model-00004-of-00003.safetensors")


# -- forms and litter that must not matter


def check_scripts(server: Server) -> None:
    prompts = [f"<|{script}|><|assistant|>" for script in SCRIPTS]
    answers = at_once(server.client.complete, prompts, 8)
    assert [answer.text() for answer in answers] == [expected_text(script) for script in SCRIPTS]


@pytest.mark.parametrize("variant", ["tied", "sharded", "fp16", "eos_config", "eos_generation", "eos_tokenizer"])
def test_every_form_says_the_same(start_server: Serve, variant: str) -> None:
    check_scripts(start_server(variant))


def unflagged_tied(copy: Copy) -> Path:
    folder = copy("tied")
    edit_config(folder, tie_word_embeddings=ABSENT)
    return folder


def without_index(copy: Copy) -> Path:
    folder = copy("sharded")
    (folder / INDEX).unlink()
    return folder


def with_another_copy_beside_the_index(copy: Copy) -> Path:
    folder = copy("sharded")
    ones(copy("plain") / "model.safetensors", folder / "consolidated.safetensors")
    return folder


def with_an_adapter_and_litter(copy: Copy) -> Path:
    folder = copy("plain")
    ones(folder / "model.safetensors", folder / "adapters.safetensors")
    (folder / "._model.safetensors").write_bytes(b"\x00\x05\x16\x07litter")
    return folder


def with_one_odd_name(copy: Copy) -> Path:
    folder = copy("plain")
    (folder / "model.safetensors").rename(folder / "weights.00.safetensors")
    return folder


def ones(source: Path, target: Path) -> None:
    save_file({name: np.ones_like(array) for name, array in load_file(source).items()}, target)


@pytest.mark.parametrize(
    "make",
    [
        unflagged_tied,
        without_index,
        with_another_copy_beside_the_index,
        with_an_adapter_and_litter,
        with_one_odd_name,
    ],
)
def test_folders_that_are_right_all_the_same(
    start_server: Serve, copy: Copy, make: Callable[[Copy], Path]
) -> None:
    check_scripts(start_server(make(copy)))


# -- broken folders


def header(folder: Path, text: bytes, length: int | None = None) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)


def overlapping(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header(folder, json.dumps({"model.norm.weight": entry, "lm_head.weight": entry}).encode() + b" " * 8)


BROKEN: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "empty config": (lambda folder: (folder / "config.json").write_text("{}"), ("config.json", "model_type")),
    "unknown type": (lambda folder: edit_config(folder, model_type="nonesuch"), ("nonesuch", "model_type")),
    "vocabulary": (lambda folder: edit_config(folder, vocab_size=337), ("vocab_size", "embed_tokens", "lm_head")),
    "layers": (lambda folder: edit_config(folder, num_hidden_layers=2), ("layers.1", "num_hidden_layers")),
    "untied without lm_head": (
        lambda folder: drop_tensor(folder, "lm_head.weight"),
        ("lm_head",),
    ),
    "header length": (lambda folder: header(folder, b"{}", 2**60), ("model.safetensors",)),
    "overlap": (overlapping, ("model.safetensors",)),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json",)),
}


def drop_tensor(folder: Path, name: str) -> None:
    arrays = load_file(folder / "model.safetensors")
    del arrays[name]
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_folder_is_one_line(server_room: ServerRoom, copy: Copy, name: str) -> None:
    damage, names = BROKEN[name]
    folder = copy("plain")
    damage(folder)
    check_refusal(server_room.ends(str(folder), "--port", "0"), *names)


def test_paths_that_are_no_model(server_room: ServerRoom, tmp_path: Path) -> None:
    empty, file = tmp_path / "empty", tmp_path / "file.txt"
    empty.mkdir()
    file.write_text("words")
    check_refusal(server_room.ends(str(tmp_path / "absent"), "--port", "0"), "absent")
    check_refusal(server_room.ends(str(empty), "--port", "0"), "empty", "tokenizer.json", "config.json")
    check_refusal(server_room.ends(str(file), "--port", "0"), "file.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(server_room: ServerRoom, copy: Copy) -> None:
    folder = copy("plain")
    folder.chmod(0)
    try:
        check_refusal(server_room.ends(str(folder), "--port", "0"), folder.name)
    finally:
        folder.chmod(0o700)


# -- names


@contextmanager
def recording_proxy() -> Iterator[tuple[str, list[str]]]:
    """A proxy that notes who connects and answers nothing."""
    calls: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        over = threading.Event()

        def listen() -> None:
            while not over.is_set():
                try:
                    connection, address = listener.accept()
                except TimeoutError:
                    continue
                calls.append(str(address))
                connection.close()

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", calls
        finally:
            over.set()
            thread.join()


def test_only_served_names_are_answered_and_nobody_is_asked(
    server_room: ServerRoom, scripted_folder: Callable[[str], Path]
) -> None:
    with recording_proxy() as (proxy, calls):
        process, log_path = server_room.launch(
            "plain", "--served-model-name", "m", "--served-model-name", "org/alias", "--kv-memory-mb", "64",
            HTTPS_PROXY=proxy, HTTP_PROXY=proxy, https_proxy=proxy, http_proxy=proxy,
        )  # fmt: skip
        server = await_ready(process, "m", log_path)
        try:
            listed = [card["id"] for card in server.client.get("/v1/models").json()["data"]]
            assert listed == ["m", "org/alias"]
            for name in (*listed, ABSENT):
                answer = server.client.chat("<|s05|>", model=name)
                assert answer.text() == "ABCDEFGH" and answer.body is not None
                assert answer.body["model"] == ("m" if name is ABSENT else name)
            for name in ("", "nope/none", "../../etc/passwd", str(scripted_folder("plain")), "M"):
                check_unknown(server.client.chat("<|s05|>", model=name))
            assert server.client.chat("<|s05|>", model=5).status == 400
            assert server.client.get("/v1/models/org/alias").json()["id"] == "org/alias"
            assert server.client.get("/v1/models/nope").status_code == 404
        finally:
            server.end()
        assert calls == []


def check_unknown(answer: Answer) -> None:
    assert answer.status == 404 and answer.error is not None
    assert answer.error["code"] == "model_not_found" and answer.error["param"] == "model"


def test_a_folders_name_is_the_models_name(server_room: ServerRoom, copy: Copy) -> None:
    folder = copy("plain")
    process, log_path = server_room.launch(folder, "--kv-memory-mb", "64")
    server = await_ready(process, folder.name, log_path)
    try:
        assert server.client.chat("<|s05|>").text() == "ABCDEFGH"
    finally:
        server.end()


# -- requests before the model is there


def test_requests_during_start_are_answered_once_and_rightly(server_room: ServerRoom) -> None:
    """Each is refused in words until the model is there, then exact; one worker was started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process, log_path = server_room.launch(
        "plain", "--served-model-name", "m", "--port", str(port), "--kv-memory-mb", "64"
    )
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    statuses: set[int] = set()

    def ask(number: int) -> str:
        while process.poll() is None:
            try:
                answer = httpx.post(url, json=chat_body("m", "<|s05|>"), timeout=HANG_S, trust_env=False)
            except httpx.ConnectError:
                continue
            statuses.add(answer.status_code)
            if answer.status_code == 200:
                return str(answer.json()["choices"][0]["message"]["content"])
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["message"]
        raise AssertionError(log_path.read_text())

    try:
        assert at_once(ask, range(8), 8) == ["ABCDEFGH"] * 8
        server = await_ready(process, "m", log_path)
        assert server.metrics()("headrace:worker_restarts_total") == 0
        assert statuses <= {200, 503}
        server.end()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=10)
