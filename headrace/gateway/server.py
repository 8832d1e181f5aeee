"""The server process: bind, start, announce, drain, stop.

    bind the port ─► start HTTP and the worker side by side ─► worker ready: one line on stdout
    SIGTERM or Ctrl-C ─► drain: new requests 503, running ones finish up to ``drain_timeout_s``, then
    get an error; a second Ctrl-C stops now ─► worker ended, socket files removed, exit code 0
    SIGHUP ─► configuration read anew, worker replaced, open requests go on; it waits for a worker that steps, and
    for a reload under way (the end of the terminal that the server was started from still is a reason to stop)

Exit codes: 0 stopped as asked; 2 a permanent fault at start (one line on stderr); 3 the port cannot be bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
import uvloop

from headrace.config import ServerConfig
from headrace.core.collector import settle_collector
from headrace.core.machine import read_memory
from headrace.errors import HeadraceError, NotReady, StartupError
from headrace.gateway import logs
from headrace.gateway.early_signals import StoppedEarly, early_signals, terminal_is_gone
from headrace.gateway.http_protocol import LimitedHttpProtocol
from headrace.gateway.metrics import Metrics
from headrace.gateway.reload import changes_http, fits_twice, needs_restart, refusal, with_fixed
from headrace.gateway.side_engines import SideEngines
from headrace.gateway.supervisor import RELOADING, Supervisor
from headrace.gateway.worker_client import WorkerClient
from headrace.gateway.worker_process import WORKER_COMMAND

if TYPE_CHECKING:
    from headrace.gateway.tracing import Tracing

EXIT_STOPPED = 0
EXIT_START_FAILED = 2
EXIT_PORT_TAKEN = 3

KEEP_ALIVE_S = 75
LAST_WRITES_S = 1
_OPEN_FILES = 65536

ASGIApp = Callable[..., Any]
# Called with (config, client, metrics), ``sides=`` where there are engines beside the main one, and ``tracing=``
# where that is on.
AppFactory = Callable[..., ASGIApp]

log = logging.getLogger("headrace.gateway")


class PortUnavailable(StartupError):
    """The address cannot be bound."""


def run_server(
    config: ServerConfig,
    make_app: AppFactory,
    *,
    reread: Callable[[], ServerConfig] | None = None,
    hangups: list[int] | None = None,
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> int:
    """Serve until told to stop; return the exit code.

    Args:
        config: validated.
        make_app: builds the HTTP application around the engine; may raise ``StartupError`` (tokenizer, template).
        reread: reads the configuration anew for a reload (``HeadraceError``: it is not usable); None: it stays.
        hangups: as ``early_signals`` takes and gives them.
        worker_command: the worker's program.
    """
    try:
        logs.configure(config.log_level, config.log_format)
        refuse_exposure(config)
        with (
            early_signals(hangups) as hangups,
            bind(config.host, config.port) as listener,
            private_folder() as folder,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            server = _Server(config, listener, folder, worker_command, make_app, reread)
            return runner.run(server.serve(hangups))
    except StoppedEarly:
        return EXIT_STOPPED
    except PortUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_PORT_TAKEN
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_START_FAILED


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_exposure(config: ServerConfig) -> None:
    """A server that others can reach needs a key, or somebody who says that it does not."""
    if not (is_loopback(config.host) or config.api_keys or config.insecure):
        raise StartupError(
            f"--host {config.host} can be reached from other machines and no --api-key is set; "
            "set one, or pass --insecure"
        )


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket, not yet listening; port 0 takes a free one."""
    if not 0 <= port <= 65535:
        raise StartupError(f"--port {port} is not between 0 and 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise PortUnavailable(f"--host {host} is not an address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)  # a port that another socket of the same address listens on fails here, not later
    except OSError as error:
        listener.close()
        raise PortUnavailable(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port"
        ) from None
    return listener


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Holds the worker's socket; only this user may enter. Removed at the end. StartupError: there is none."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="headrace-"))
    except OSError as error:
        raise StartupError(f"no folder for temporary files ({error.strerror}); set TMPDIR to one") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Front:
    """The HTTP application; another one takes over between two requests."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the gateway decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """The parts of a running server and the order in which they start and stop."""

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        folder: Path,
        worker_command: Sequence[str],
        make_app: AppFactory,
        reread: Callable[[], ServerConfig] | None,
    ) -> None:
        self._config = config
        self._listener = listener
        self._make_app = make_app
        self._reread = reread
        self._client = WorkerClient(max_held=config.engine.max_queue)
        self._metrics = Metrics(config.served_model_names[0], self._client, _key_names(config))
        self._client.on_step = self._metrics.step
        self._client.on_reload = self._reload_now
        self._reloading = asyncio.Lock()
        self._sides = SideEngines(config, folder, worker_command)
        self._tracing = _tracing(config)
        self._front = _Front(self._app(config))
        self._supervisor = Supervisor(
            config.engine,
            self._client,
            folder=folder,
            stall_timeout_s=config.worker_stall_timeout_s,
            command=worker_command,
        )

    def _app(self, config: ServerConfig) -> ASGIApp:
        more: dict[str, Any] = {"sides": self._sides.clients} if self._sides.clients else {}
        if self._tracing is not None:
            more["tracing"] = self._tracing
        return self._make_app(config, self._client, self._metrics, **more)

    async def _run_engines(self) -> None:
        """The main engine's life, behind the start of those beside it."""
        await self._sides.start()
        await self._supervisor.run()

    async def serve(self, hangups: Sequence[int] = ()) -> int:
        """``hangups``: those that came before this; they are one wish for a reload."""
        client, supervisor = self._client, self._supervisor
        http = _HttpServer(self._uvicorn_config(self._front))
        hangup = asyncio.Event()
        stop, stop_now = _stop_events(hangup.set)
        if hangups:
            hangup.set()
        raise_open_files()
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        engine = asyncio.create_task(self._run_engines())
        announcing = asyncio.create_task(self._announce(client))
        reloading = asyncio.create_task(self._reload_on(hangup, stop))
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait({serving, engine, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if engine in done and engine.exception() is None:  # given up; say so on /health until told to stop
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                await self._drain(client, http, stop_now)
        finally:
            for task in (announcing, stopping, reloading):
                task.cancel()
            http.should_exit = True
            http.force_exit = stop_now.is_set()
            await asyncio.gather(supervisor.stop(), self._sides.stop())
            await asyncio.wait({serving, engine})
            supervisor.close()
            self._sides.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
        engine.result()
        serving.result()
        return EXIT_STOPPED

    async def _reload_on(self, hangup: asyncio.Event, stop: asyncio.Event) -> None:
        """A reload for every hangup, for several before it begins one; its outcome is in the log."""
        while True:
            await hangup.wait()
            if not self._client.settled.is_set():
                log.info("reload: waits until a worker is ready")
            await self._client.settled.wait()
            async with self._reloading:
                hangup.clear()
                if stop.is_set():
                    return
                try:
                    await self._reload()
                except Exception:
                    log.exception("reload: failed")

    async def _reload_now(self) -> str:
        if self._reloading.locked():
            return RELOADING
        async with self._reloading:
            return await self._reload()

    async def _reload(self) -> str:
        """See ``EngineClient.reload``. What cannot be taken over changes nothing."""
        old = self._config
        try:
            read = old if self._reread is None else await asyncio.to_thread(self._reread)
            new = with_fixed(old, read)
            reason = refusal(old, new)
            app = None
            if not reason and changes_http(old, new):
                app = await asyncio.to_thread(self._app, new)
        except HeadraceError as error:
            reason, app = str(error), None
        if not reason:
            for name in needs_restart(old, read):
                log.warning("reload: %s takes effect when the server is started anew", name)
            ready = self._client.state().ready
            beside = ready is not None and fits_twice(ready, old.engine, read_memory())
            log.info("reload: replacing the worker", extra={"side_by_side": beside})
            reason = await self._supervisor.reload(new.engine, side_by_side=beside)
        if reason:
            log.error("reload: %s", reason)
            return reason
        self._config = new
        self._client.set_max_held(new.engine.max_queue)
        self._metrics.add_keys(_key_names(new))
        if app is not None:
            self._front.app = app
            settle_collector()
        log.info("reload: done")
        return ""

    def _uvicorn_config(self, app: ASGIApp) -> uvicorn.Config:
        config = self._config
        settings = uvicorn.Config(
            app,
            http=LimitedHttpProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WRITES_S,
        )
        try:
            settings.load()
        except OSError as error:  # ssl.SSLError is one
            raise StartupError(
                f"--ssl-certfile or --ssl-keyfile cannot be used: {error.strerror or error}"
            ) from None
        return settings

    async def _announce(self, client: WorkerClient) -> None:
        """One line when the model first answers: where, and something to paste. Before it, a length cut short."""
        await client.first_ready.wait()
        settle_collector()
        ready = client.state().ready
        if ready is not None and "model_len_lowered" in ready.plan:
            print(f"Note: {ready.plan['model_len_lowered']}")
        print(ready_line(self._config, self._listener.getsockname()[1]), flush=True)

    async def _all_drained(self) -> None:
        await self._client.drained()
        await self._sides.drained()

    async def _drain(self, client: WorkerClient, http: _HttpServer, stop_now: asyncio.Event) -> None:
        limit_s = self._config.drain_timeout_s
        deadline = time.monotonic() + limit_s
        log.info("draining: no new requests, running ones may finish", extra={"limit_s": limit_s})
        client.start_draining("the server is shutting down")
        self._sides.start_draining("the server is shutting down")
        waits = {asyncio.create_task(self._all_drained()), asyncio.create_task(stop_now.wait())}
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        error = NotReady("the server shut down before this request was finished")
        client.fail_all(error)
        self._sides.fail_all(error)
        # readers may still take what is written for them
        http.config.timeout_graceful_shutdown = max(LAST_WRITES_S, int(deadline - time.monotonic()))


def _tracing(config: ServerConfig) -> Tracing | None:
    """None, and nothing imported, without ``--otlp-traces-endpoint``."""
    if config.otlp_traces_endpoint is None:
        return None
    from headrace.gateway.tracing import open_tracing

    return open_tracing(config.served_model_names[0], config.otlp_traces_endpoint)


def _key_names(config: ServerConfig) -> list[str]:
    return [key.name for key in config.api_keys]


def _stop_events(reload: Callable[[], None]) -> tuple[asyncio.Event, asyncio.Event]:
    """(stop, stop now): set by the first signal, and by the second Ctrl-C or SIGTERM. SIGHUP calls ``reload``."""
    stop, stop_now = asyncio.Event(), asyncio.Event()
    has_terminal = os.isatty(0)

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    def on_hangup() -> None:
        if terminal_is_gone(has_terminal):
            on_signal()
        elif not stop.is_set():
            reload()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    return stop, stop_now


def ready_line(config: ServerConfig, port: int) -> str:
    scheme = "https" if config.ssl_certfile else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(config.host, config.host)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    url = f"{scheme}://{host}:{port}{config.root_path}"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_keys else ""
    message = {"role": "user", "content": "Hello"}
    body = msgspec.json.encode({"model": config.served_model_names[0], "messages": [message]}).decode()
    return (
        f"Ready: {url}  Try: curl {url}/v1/chat/completions"
        f" -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    )


def raise_open_files() -> None:
    """A stream is a file descriptor; take as many as this user may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
