"""``headrace service install|uninstall|status``: the server as a service of the system.

    macOS   launchd: a LaunchDaemon starts before anybody logs in; ``--user``: a LaunchAgent, at login
    Linux   systemd: a system unit; ``--user``: a unit of the user's own manager

What stands behind ``--`` are the words of ``headrace serve``; they are checked before anything is written and mean
what they mean in the present folder. Keys do not belong into a unit that others may read: ``--api-key`` is refused
there, ``--api-key-file`` is not. A file is written only where none of another making is. ``--dry-run`` prints it.
"""

from __future__ import annotations

import argparse
import os
import plistlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.cli.flags import OneLineParser
from headrace.errors import StartupError

MARK = "Written by headrace service install"
DRAIN_S = 45  # longer than the server's own limit for open requests
_SERVE = "headrace.cli.main"


@dataclass(frozen=True, slots=True)
class Service:
    """What is installed.

    Attributes:
        name: of the unit or the label's last part.
        words: command line of the server.
        user: a service of this user's session instead of the machine's.
        account: who runs a service of the machine; None: the superuser (macOS), or a user of systemd's making.
        folder: that relative paths in ``words`` start from.
        log_path: where launchd puts what the server prints; systemd keeps it in its journal.
    """

    name: str
    words: tuple[str, ...]
    user: bool
    account: str | None = None
    folder: str = "/"
    log_path: str = "/var/log/headrace.log"


def launchd_plist(service: Service) -> bytes:
    """A LaunchDaemon's or LaunchAgent's property list. Restarted when it fails, not when it was told to stop."""
    content: dict[str, object] = {
        "Label": label(service.name),
        "ProgramArguments": list(service.words),
        "WorkingDirectory": service.folder,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ExitTimeOut": DRAIN_S,
        "ThrottleInterval": 10,
        "ProcessType": "Interactive",  # the system does not slow it down
        "StandardOutPath": service.log_path,
        "StandardErrorPath": service.log_path,
        "SoftResourceLimits": {"NumberOfFiles": 65536},
        "HardResourceLimits": {"NumberOfFiles": 65536},
        "Comment": MARK,
    }
    if service.account and not service.user:
        content["UserName"] = service.account
    return plistlib.dumps(content, sort_keys=False)


def systemd_unit(service: Service) -> bytes:
    """A unit file. Permanent faults (exit codes 2 and 3) are not tried again."""
    command = " ".join(_quoted(word) for word in service.words)
    lines = [
        f"# {MARK}",
        "[Unit]",
        "Description=Headrace inference server",
        "After=network-online.target",
        "Wants=network-online.target",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={command}",
        f"WorkingDirectory={_quoted(service.folder)}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "KillMode=mixed",
        f"TimeoutStopSec={DRAIN_S}",
        "Restart=on-failure",
        "RestartSec=5",
        "RestartPreventExitStatus=2 3",
        "LimitNOFILE=65536",
        "NoNewPrivileges=true",
        "PrivateTmp=true",
    ]
    if not service.user:
        lines += (
            [f"User={service.account}"]
            if service.account
            else [
                "DynamicUser=true",  # it has no home; these folders are its own
                f"CacheDirectory={service.name}",
                f"StateDirectory={service.name}",
                f"Environment=HEADRACE_CACHE=/var/cache/{service.name} HEADRACE_STATE=/var/lib/{service.name}",
            ]
        )
    lines += ["", "[Install]", f"WantedBy={'default.target' if service.user else 'multi-user.target'}", ""]
    return "\n".join(lines).encode()


def _quoted(word: str) -> str:
    """One word of ExecStart: specifiers and variables are not expanded."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if not escaped or any(c in escaped for c in " \t'\";#\\") else escaped


def label(name: str) -> str:
    return f"io.headrace.{name}"


def default_path(platform: str, service: Service, home: Path) -> Path:
    """Where the system looks for it."""
    if platform == "darwin":
        folder = home / "Library/LaunchAgents" if service.user else Path("/Library/LaunchDaemons")
        return folder / f"{label(service.name)}.plist"
    folder = home / ".config/systemd/user" if service.user else Path("/etc/systemd/system")
    return folder / f"{service.name}.service"


def render(platform: str, service: Service) -> bytes:
    return launchd_plist(service) if platform == "darwin" else systemd_unit(service)


def activation(platform: str, service: Service, path: Path, *, on: bool) -> list[list[str]]:
    """Commands that make the system take notice."""
    if platform == "darwin":
        domain = f"gui/{os.getuid()}" if service.user else "system"
        if on:
            return [["launchctl", "bootstrap", domain, str(path)]]
        return [["launchctl", "bootout", f"{domain}/{label(service.name)}"]]
    manager = ["systemctl", *(["--user"] if service.user else [])]
    if on:
        return [[*manager, "daemon-reload"], [*manager, "enable", "--now", service.name]]
    return [[*manager, "disable", "--now", service.name]]


# -- the command ---------------------------------------------------------------------------------------


def run(argv: Sequence[str]) -> int:
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    args = _parser().parse_args(words[:cut])
    service = _service(args, words[cut + 1 :])
    platform = sys.platform
    path = Path(args.path) if args.path else default_path(platform, service, Path.home())
    if args.action == "install":
        return _install(platform, service, path, args)
    if args.action == "uninstall":
        return _uninstall(platform, service, path, args)
    return _status(platform, service, path)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="headrace service",
        usage="headrace service install|uninstall|status [options] [-- WORDS OF serve]",
        description="Run the server as a service of launchd (macOS) or systemd (Linux).",
    )
    parser.add_argument("action", choices=("install", "uninstall", "status"))
    parser.add_argument("--name", default="headrace", help="of the service (default: headrace)")
    parser.add_argument("--user", action="store_true", help="a service of your session, not of the machine")
    parser.add_argument("--account", help="who runs a service of the machine")
    parser.add_argument("--path", help="write the file here, and do not start anything")
    parser.add_argument("--dry-run", action="store_true", help="print the file and the commands, change nothing")
    return parser


def _service(args: argparse.Namespace, serve: list[str]) -> Service:
    if args.user and args.account:
        raise StartupError("--user and --account contradict each other: a user's service runs as that user")
    if not args.name.replace("-", "").replace("_", "").isalnum():
        raise StartupError(f"--name {args.name!r} may have letters, digits, - and _")
    if args.action == "install":
        _check(serve)
    log_path = str(Path.home() / "Library/Logs/headrace.log") if args.user else f"/var/log/{args.name}.log"
    command = (sys.executable, "-m", _SERVE, "serve", *serve)
    return Service(args.name, command, args.user, args.account, os.getcwd(), log_path)


def _check(serve: list[str]) -> None:
    """Refuse what could not serve, or what would show a key to everybody who may read the file."""
    if any(word == "--api-key" or word.startswith("--api-key=") for word in serve):
        raise StartupError("a service's file can be read by others: use --api-key-file instead of --api-key")
    from headrace.cli.serve import parse

    parse(serve)


def _install(platform: str, service: Service, path: Path, args: argparse.Namespace) -> int:
    content = render(platform, service)
    commands = [] if args.path else activation(platform, service, path, on=True)
    if args.dry_run:
        print(f"# {path}\n{content.decode()}", end="")
        for command in commands:
            print(f"# {shlex.join(command)}")
        return 0
    if path.exists() and MARK.encode() not in path.read_bytes():
        raise StartupError(f"{path} exists and was not written by this command; remove it, or choose --name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o644)
    except OSError as error:
        raise StartupError(
            f"{path} cannot be written ({error.strerror}); run this with sudo, or with --user"
        ) from None
    print(f"written: {path}")
    return _run_all(commands)


def _uninstall(platform: str, service: Service, path: Path, args: argparse.Namespace) -> int:
    commands = [] if args.path else activation(platform, service, path, on=False)
    if args.dry_run:
        for command in commands:
            print(f"# {shlex.join(command)}")
        print(f"# rm {path}")
        return 0
    if not path.exists():
        print(f"not installed: {path}")
        return 1
    if MARK.encode() not in path.read_bytes():
        raise StartupError(f"{path} was not written by this command; it stays")
    code = _run_all(commands)
    try:
        path.unlink()
    except OSError as error:
        raise StartupError(f"{path} cannot be removed ({error.strerror}); run this with sudo") from None
    print(f"removed: {path}")
    return code


def _status(platform: str, service: Service, path: Path) -> int:
    """0: installed and running; 1: not."""
    if not path.exists():
        print(f"not installed: {path}")
        return 1
    print(f"installed: {path}")
    if platform == "darwin":
        domain = f"gui/{os.getuid()}" if service.user else "system"
        command = ["launchctl", "print", f"{domain}/{label(service.name)}"]
    else:
        command = ["systemctl", *(["--user"] if service.user else []), "is-active", service.name]
    return 0 if _run_all([command]) == 0 else 1


def _run_all(commands: list[list[str]]) -> int:
    for command in commands:
        try:
            code = subprocess.run(command, check=False).returncode
        except OSError as error:
            print(f"headrace service: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
            return 1
        if code:
            print(f"headrace service: {shlex.join(command)} ended with code {code}", file=sys.stderr)
            return 1
    return 0
