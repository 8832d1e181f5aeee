"""The command line as a process sees it: exit codes, streams, one line per fault."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace import __version__
from headrace.cli.main import COMMANDS, NOT_YET, main
from headrace.errors import ModelFileError

RunResult = tuple[int, str, str]


def call(capsys: pytest.CaptureFixture[str], *words: str) -> RunResult:
    try:
        code = main(list(words))
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "--help")
    assert (code, err) == (0, "") and all(name in out for name in COMMANDS)
    assert call(capsys, "--version") == (0, f"headrace {__version__}\n", "")


@pytest.mark.parametrize("command", ["serve", "plan", *NOT_YET])
def test_help_and_version_of_commands(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, err = call(capsys, command, "--help")
    assert code == 0 and out and not err
    assert call(capsys, command, "--version") == (0, f"headrace {__version__}\n", "")


@pytest.mark.parametrize("command", list(NOT_YET))
def test_commands_to_come_say_so(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, err = call(capsys, command, "x")
    assert code == 2 and not out and "not available yet" in err and err.count("\n") == 1


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "serv")
    assert (code, out) == (2, "") and "did you mean serve?" in err and err.count("\n") == 1


def test_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys)
    assert (code, out) == (2, "") and "usage" in err


def test_a_fault_at_start_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import headrace.cli.serve as serve

    def broken(argv: list[str]) -> int:
        raise ModelFileError("model.safetensors is incomplete:\n 12 of 40 bytes")

    monkeypatch.setattr(serve, "run", broken)
    assert call(capsys, "serve") == (
        2,
        "",
        "headrace serve: model.safetensors is incomplete: 12 of 40 bytes\n",
    )


def test_help_imports_nothing_heavy() -> None:
    heavy = "('mlx', 'fastapi', 'uvicorn', 'tokenizers', 'huggingface_hub', 'numpy', 'zmq', 'msgspec', 'pydantic')"
    script = (
        "import sys\nfrom headrace.cli.main import main\n"
        "for words in (['--help'], ['serve', '--help'], ['serve', '--version']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model", "inspect", "x", "--revison", "y"), "unknown flag --revison: did you mean --revision?"),
        (("model", "acquire", "x", "--target=y"), "unknown flag --target: did you mean --target-dir?"),
        (("service", "install", "--usr"), "unknown flag --usr: did you mean --user?"),
        (("service", "instal"), "invalid choice: 'instal'"),
        (("doctor", "--hlp"), "unknown flag --hlp: did you mean --help?"),
        (("doctor", "x"), "unexpected x"),
        (("serve", "--continuous-batching=false"), "--continuous-batching takes no value"),
        (("serve", ""), "the model's name is empty"),
        (("model", "inspect", " "), "the model's name is empty"),
        (("serve", "caf\udce9"), "no text in the system's encoding"),
        (("serve", "--revision", "main"), "--revision is for models from a hub"),
        (("serve", "a" * 300), "cannot be read: File name too long"),
        (("plan", "a" * 300), "cannot be read: File name too long"),
        (("model", "inspect", "a" * 300), "cannot be read: File name too long"),
        (("serve", "--memory-headroom", "1"), "must be a number, at least 0 and below 1; got '1'"),
        (("serve", "--gpu-memory-utilization", "0"), "must be a number above 0 and at most 1; got '0'"),
    ],
)
def test_wrong_words_are_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1, err


def test_a_file_that_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a" * 300
    code, out, err = call(capsys, "service", "install", "--path", name)
    assert (code, out, err) == (1, "", f"headrace service: {name}: File name too long\n")


@pytest.mark.parametrize("words", [("serve",), ("plan",), ("model", "inspect")])
@pytest.mark.parametrize("name", ["config.json", None])
def test_a_folder_that_cannot_be_read_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], name: str | None
) -> None:
    if name is not None:
        (tmp_path / name).symlink_to("a" * 300)
    code, out, err = call(capsys, *words, str(tmp_path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (f"{name}: cannot be read: File name too long" if name else ": the folder is empty") in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_standard_files_that_are_closed_or_full() -> None:
    command = [sys.executable, "-m", "headrace.cli.main", "--version"]
    closed = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command], timeout=60)
    assert closed.returncode == 0
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "No space left" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "locale", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_any_locale_does(locale: dict[str, str], scripted_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """What the terminal has no character for is escaped; our own files are UTF-8 whatever it has."""
    folder = tmp_path / "m\u00f6del \U0001f600"
    folder.symlink_to(scripted_folder("plain"))
    (tmp_path / "plain").symlink_to(folder)
    environment = {**os.environ, "LC_ALL": "C", **locale}
    name = str(folder) if "PYTHONUTF8" not in locale else str(tmp_path / "plain")
    said = {}
    for words in (["plan", name], ["model", "inspect", name], ["doctor"]):
        command = [sys.executable, "-m", "headrace.cli.main", *words]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
        assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
        assert done.stdout and done.stdout.isascii()
        said[words[0]] = done.stdout
    assert said["plan"].startswith(b"plain on " if "PYTHONUTF8" in locale else rb"m\xf6del \U0001f600 on ")
