"""The server process from outside: start, ready line, signals, drain, exit codes, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from engine_harness import engine_config, expected, request

from headrace.config import ServerConfig
from headrace.gateway.early_signals import early_signals
from headrace.gateway.server import (
    EXIT_STOPPED,
    bind,
    is_loopback,
    ready_line,
    refuse_exposure,
    run_server,
)

pytestmark = pytest.mark.slow

SERVER = Path(__file__).with_name("fake_server.py")


class Server:
    """One server process; ``url`` once it printed its ready line."""

    def __init__(
        self, tmp: Path, *, port: int = 0, host: str = "127.0.0.1", behaviour: Any = None, **more: Any
    ) -> None:
        config = ServerConfig(
            engine=engine_config(**(behaviour or {})), served_model_names=("m",), host=host, port=port, **more
        )
        self.tmp = tmp
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), msgspec.json.encode(config).decode()],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp)},
        )  # fmt: skip
        self.url = ""

    def ready(self) -> Server:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"Ready: (http://\S+)  Try: curl ", line)
        assert found, line
        self.url = found[1]
        return self

    def worker(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, timeout_s: float = 20.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    servers: list[Server] = []

    def start_one(**more: Any) -> Server:
        servers.append(Server(tmp_path, **more))
        return servers[-1]

    yield start_one
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


class Client(threading.Thread):
    """Reads one generation in the background."""

    def __init__(self, server: Server, name: str, max_tokens: int, **more: Any) -> None:
        super().__init__()
        self.server, self.body = server, {"id": name, "max_tokens": max_tokens, **more}
        self.lines: list[str] = []
        self.status = 0
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self.server.url}/generate", json=self.body, timeout=60) as response:
                self.status = response.status_code
                self.lines.extend(response.iter_lines())
        except httpx.TransportError as error:
            self.lines.append(f"cut: {type(error).__name__}")

    def wait_for(self, count: int) -> None:
        while len(self.lines) < count and self.is_alive():
            time.sleep(0.01)


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


def begun(server: Server) -> psutil.Process:
    """The worker, which need not be ready."""
    while len(psutil.Process(server.process.pid).children()) != 1:
        time.sleep(0.05)
    time.sleep(0.5)  # until the gateway listens to signals
    return server.worker()


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # nobody may be there to reap it
    except psutil.NoSuchProcess:
        return True


def gone(process: psutil.Process) -> bool:
    try:
        process.wait(2)
    except psutil.TimeoutExpired:
        return False
    return True


def test_what_lives_as_long_as_the_server_is_not_collected_over_and_over(start: Any) -> None:
    server = start().ready()
    assert int(httpx.get(f"{server.url}/frozen").text) > 10_000


def test_ready_line_health_and_a_clean_stop(start: Any, tmp_path: Path) -> None:
    server = start().ready()
    assert httpx.get(f"{server.url}/health").status_code == 200
    client = Client(server, "r", 30)
    client.join()
    assert client.lines == [*map(str, expected(request("r", 30))), "end"]
    worker = server.worker()
    server.signal(signal.SIGTERM)
    code, out, err = server.end()
    assert (code, out) == (0, "") and "Traceback" not in err
    assert gone(worker)
    assert list(tmp_path.glob("headrace-*")) == []


def test_health_is_503_while_loading(start: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = start(port=port, behaviour={"block": str(gate)})
    url = f"http://127.0.0.1:{port}"
    while True:
        try:
            status = httpx.get(f"{url}/health").status_code
            break
        except httpx.TransportError:
            time.sleep(0.02)
    assert status == 503
    assert httpx.post(f"{url}/generate", json={"id": "r", "max_tokens": 1}).status_code == 503
    gate.touch()
    server.ready()
    assert server.url == url and httpx.get(f"{url}/health").status_code == 200


def test_drain_finishes_the_short_and_ends_the_long(start: Any) -> None:
    server = start(behaviour={"step_s": 0.01}, drain_timeout_s=3.0).ready()
    short, long = Client(server, "short", 60), Client(server, "long", 4000, seed=1)
    for client in (short, long):
        client.wait_for(5)
    server.signal(signal.SIGTERM)
    while (
        refused := httpx.post(f"{server.url}/generate", json={"id": "new", "max_tokens": 1})
    ).status_code == 200:
        time.sleep(0.01)
    assert refused.status_code == 503
    code, _, err = server.end()
    short.join()
    long.join()
    assert short.lines == [*map(str, expected(request("short", 60))), "end"]
    assert long.lines[-1] == "error 503"
    assert code == 0 and "Traceback" not in err


def test_a_second_interrupt_stops_now(start: Any, tmp_path: Path) -> None:
    server = start(behaviour={"step_s": 0.01}, drain_timeout_s=600.0).ready()
    long = Client(server, "long", 4000)
    long.wait_for(5)
    worker = server.worker()
    server.signal(signal.SIGINT)
    time.sleep(0.3)
    assert server.process.poll() is None
    server.signal(signal.SIGINT)
    assert server.end()[0] == 0
    long.join()
    assert gone(worker) and list(tmp_path.glob("headrace-*")) == []


def test_a_worker_never_outlives_its_gateway(start: Any, tmp_path: Path) -> None:
    server = start(behaviour={"step_s": 0.01}).ready()
    long = Client(server, "long", 4000)
    long.wait_for(5)
    worker = server.worker()
    server.signal(signal.SIGKILL)
    assert gone(worker)
    assert list(tmp_path.glob("headrace-*")) == []
    long.join()


def test_a_killed_worker_is_a_pause_over_http(start: Any) -> None:
    server = start(behaviour={"step_s": 0.01}).ready()
    client = Client(server, "r", 150)
    client.wait_for(10)
    server.worker().kill()
    client.join()
    assert client.lines == [*map(str, expected(request("r", 150))), "end"]


def test_a_stop_while_loading(start: Any, tmp_path: Path) -> None:
    server = start(behaviour={"block": str(tmp_path / "never")})
    while not list(tmp_path.glob("headrace-*/step-*")) and server.process.poll() is None:
        if len(psutil.Process(server.process.pid).children()) == 1:
            break
        time.sleep(0.02)
    time.sleep(0.3)
    server.signal(signal.SIGTERM)
    code, out, err = server.end()
    assert (code, out, err.count("Traceback")) == (0, "", 0)
    assert list(tmp_path.glob("headrace-*")) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_before_the_loop_runs_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    """While the application is made (tokenizer, template) nobody listens in an event loop yet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = signal.getsignal(number)
    folders: list[Path] = []

    def make_app(*args: object) -> Any:
        folders.extend(tmp_path.glob("headrace-*"))
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was not heard")

    config = ServerConfig(engine=engine_config(), served_model_names=("m",), port=0)
    assert run_server(config, make_app) == EXIT_STOPPED
    assert len(folders) == 1 and list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is before


def test_a_hangup_before_the_loop_runs_waits() -> None:
    with early_signals() as hangups:
        os.kill(os.getpid(), signal.SIGHUP)
        assert hangups == [signal.SIGHUP]


def test_no_folder_for_temporary_files_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    config = ServerConfig(engine=engine_config(), served_model_names=("m",), port=0)
    assert run_server(config, lambda *args: None) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: no folder for temporary files (") and err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("loaded", [False, True])
def test_what_a_worker_started_ends_with_the_server(
    start: Any, tmp_path: Path, number: signal.Signals, loaded: bool
) -> None:
    """Compilers, at a first start."""
    noted = tmp_path / "child"
    more = {} if loaded else {"block": str(tmp_path / "never")}
    server = start(behaviour={"child": str(noted), **more})
    if loaded:
        server.ready()
    while not (noted.exists() and noted.read_text()):
        time.sleep(0.05)
    child = psutil.Process(int(noted.read_text()))
    server.signal(number)
    server.end()
    deadline = time.monotonic() + 10
    while not ended(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended(child)


def test_a_client_that_never_reads_does_not_hold_up_the_stop(start: Any) -> None:
    server = start(drain_timeout_s=1.0).ready()
    body = b'{"id": "silent", "max_tokens": 4000, "padding": 5000}'
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        silent.sendall(head + body)
        client = Client(server, "other", 100, seed=3)
        client.join()
        assert client.lines[-1] == "end"
        server.signal(signal.SIGTERM)
        code, _, err = server.end()
    assert code == 0 and "Traceback" not in err


def test_permanent_faults_end_with_one_line(start: Any, tmp_path: Path) -> None:
    code, out, err = start(behaviour={"fail": "config.json: hidden_size is missing"}).end()
    assert (code, out) == (2, "")
    assert [line for line in err.splitlines() if line.startswith("error:")] == [
        "error: config.json: hidden_size is missing"
    ]
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1, err
    code, _, err = start(ssl_certfile=str(tmp_path / "no.pem")).end()
    assert code == 2 and "--ssl-certfile" in err and len(err.splitlines()) == 1
    code, _, err = start(host="0.0.0.0").end()
    assert code == 2 and "--api-key" in err and len(err.splitlines()) == 1
    assert list(tmp_path.glob("headrace-*")) == []


@pytest.mark.parametrize("family, address", [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")])
def test_a_taken_port_is_named(start: Any, family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as holder:
        holder.bind((address, 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, out, err = start(port=port).end()
    assert code == 3 and out == "" and str(port) in err and len(err.splitlines()) == 1


def test_an_endless_head_is_refused(start: Any) -> None:
    server = start().ready()
    port = int(server.url.rsplit(":", 1)[1])
    endless = b"GET / HTTP/1.1\r\nX-Junk: " + b"a" * 300_000
    for junk in (endless, endless[:90_000] + b"\r\n\r\n", b"GET /" + b"a" * 300_000, endless + b"a" * 5_000_000):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(junk)  # all of it, whenever the server has had enough
            answer = read_to_end(connection)
            assert answer.startswith(b"HTTP/1.1 431") and answer.count(b"HTTP/1.1") == 1
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"NONSENSE\r\n\r\n")
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 400") and b'{"error":' in answer
    assert httpx.get(f"{server.url}/health").status_code == 200
    large = {"id": "large", "max_tokens": 2, "filler": "a" * 400_000}
    with httpx.Client() as client:
        for _ in range(3):
            answer = client.post(f"{server.url}/generate", json=large)
            assert answer.status_code == 200 and answer.text.endswith("end\n")


@pytest.mark.parametrize(
    "body", [b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n", b"Transfer-Encoding: gzip\r\n\r\nabc"]
)
def test_a_body_that_is_no_http_is_refused_in_words(start: Any, body: bytes) -> None:
    server = start().ready()
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"POST /health HTTP/1.1\r\nHost: x\r\n" + body)
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
    assert b'{"error":' in answer and b"\r\nx-request-id: " in answer
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_client_that_sends_no_more_still_gets_what_is_soon_there(start: Any) -> None:
    server = start().ready()
    port = int(server.url.rsplit(":", 1)[1])
    body = msgspec.json.encode({"id": "h", "max_tokens": 5})
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        connection.shutdown(socket.SHUT_WR)
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200") and b"end\n" in answer
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        connection.shutdown(socket.SHUT_WR)
        assert read_to_end(connection) == b""


@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_NOFILE"), reason="limits of another process: Linux only")
def test_a_client_that_leaves_with_a_second_request_on_its_way_is_no_fault(start: Any) -> None:
    server = start(behaviour={"step_s": 0.005}).ready()
    port = int(server.url.rsplit(":", 1)[1])
    body = json.dumps({"id": "r", "max_tokens": 300}).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head + body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(head + body.replace(b'"r"', b'"s"'))
        connection.recv(4096)
    time.sleep(0.5)
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.signal(signal.SIGTERM)
    code, _, err = server.end()
    assert code == 0 and "Traceback" not in err, err[-2000:]


def test_more_connections_than_files_are_refused_in_words(start: Any) -> None:
    server = start().ready()
    psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE, (140, 140))
    port = int(server.url.rsplit(":", 1)[1])
    idle = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(70)]  # half
    time.sleep(0.2)
    refused = httpx.post(f"{server.url}/generate", content=b" " * 3_000_000)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "service_unavailable_error"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 503")
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")  # it is refused as a whole
        assert read_to_end(connection).count(b"HTTP/1.1") == 0
    for connection in idle:
        connection.close()
    time.sleep(0.2)
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("first", ["gateway", "worker"])
def test_nothing_is_left_whoever_is_killed_first(start: Any, tmp_path: Path, first: str) -> None:
    server = start().ready()
    worker = server.worker()
    both = [server.process.pid, worker.pid]
    for pid in both if first == "gateway" else reversed(both):
        os.kill(pid, signal.SIGKILL)
    assert gone(worker)
    server.end()
    again = start(behaviour={}).ready()
    client = Client(again, "r", 10)
    client.join()
    assert client.lines[-1] == "end"
    again.signal(signal.SIGTERM)
    assert again.end()[0] == 0


def test_hangup_replaces_the_worker_and_loses_nothing(start: Any) -> None:
    server = start(behaviour={"step_s": 0.01}).ready()
    worker = server.worker()
    client = Client(server, "r", 200)
    client.wait_for(10)
    server.signal(signal.SIGHUP)
    assert gone(worker) or gone(worker)
    client.join()
    assert client.lines == [*map(str, expected(request("r", 200))), "end"]
    server.signal(signal.SIGTERM)
    assert server.end()[0] == 0


def test_hangups_while_no_worker_steps_wait_for_one(start: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    server = start(behaviour={"block": str(gate)})
    first = begun(server)
    server.signal(signal.SIGHUP)
    server.signal(signal.SIGHUP)
    time.sleep(0.5)
    assert first.is_running()
    gate.touch()
    server.ready()
    assert gone(first)  # replaced, once
    time.sleep(1)
    second = server.worker()
    gate.unlink()
    second.kill()
    assert gone(second)
    third = begun(server)
    server.signal(signal.SIGHUP)
    time.sleep(0.3)
    gate.touch()
    assert gone(third)
    Client(server, "r", 5).join()
    server.signal(signal.SIGTERM)
    code, _, err = server.end()
    assert (code, err.count("reload: done"), err.count("Traceback")) == (0, 2, 0)
    assert err.count("reload: waits until a worker is ready") == 2


def test_a_hangup_during_a_reload_is_another_reload(start: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    server = start(behaviour={"block": str(gate)}).ready()
    gate.unlink()
    server.signal(signal.SIGHUP)
    time.sleep(1)
    server.signal(signal.SIGHUP)
    time.sleep(0.3)
    gate.touch()
    time.sleep(3)
    server.signal(signal.SIGTERM)
    code, _, err = server.end()
    assert (code, err.count("reload: done"), err.count("ERROR")) == (0, 2, 0)


def test_what_a_worker_warns_of_is_a_warning_here(start: Any) -> None:
    server = start(log_level="warning").ready()
    bad = Client(server, "bad", 10, marks=[901])
    bad.join()
    server.signal(signal.SIGTERM)
    code, _, err = server.end()
    assert code == 0 and " ERROR worker: step poisoned" in err
    assert " ERROR worker: RuntimeError: the device reported a fault" in err and " INFO " not in err


def test_small_parts() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")
    base = {"engine": engine_config(), "served_model_names": ("m",)}
    refuse_exposure(ServerConfig(**base, host="0.0.0.0", insecure=True))
    line = ready_line(ServerConfig(**base, host="::", root_path="/x"), 99)
    assert line.startswith("Ready: http://[::1]:99/x  Try: curl http://[::1]:99/x/v1/chat/completions")
    words = shlex.split(ready_line(ServerConfig(**{**base, "served_model_names": ('it\'s "é"\\',)}), 99))
    assert json.loads(words[-1])["model"] == 'it\'s "é"\\'
    with bind("localhost", 0) as listener:
        assert listener.getsockname()[1] > 0


def test_an_idle_server_uses_no_cpu(start: Any) -> None:
    server = start().ready()
    Client(server, "r", 10).join()
    time.sleep(1)
    tree = [psutil.Process(server.process.pid), server.worker()]
    before = sum(sum(process.cpu_times()[:2]) for process in tree)
    time.sleep(5)
    assert sum(sum(process.cpu_times()[:2]) for process in tree) - before < 0.15
