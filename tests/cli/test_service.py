"""Services: files that launchd and systemd accept, written and removed with care."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import service
from headrace.cli.flags import UsageError
from headrace.cli.service import Service, default_path, launchd_plist, systemd_unit
from headrace.errors import StartupError

WORDS = ("/usr/bin/python3", "-m", "headrace.cli.main", "serve", "/models/with space", "--port", "80", 'a"b%c$d')


def test_a_plist_says_what_was_asked() -> None:
    found = plistlib.loads(launchd_plist(Service("headrace", WORDS, user=False, account="llm")))
    assert found["ProgramArguments"] == list(WORDS)
    assert (found["Label"], found["UserName"]) == ("io.headrace.headrace", "llm")
    assert found["RunAtLoad"] is True and found["KeepAlive"] == {"SuccessfulExit": False}
    assert found["ExitTimeOut"] >= 30
    assert "UserName" not in plistlib.loads(launchd_plist(Service("x", WORDS, user=True)))


@pytest.mark.parametrize("user", [True, False])
def test_systemd_accepts_the_unit(tmp_path: Path, user: bool) -> None:
    unit = tmp_path / "headrace.service"
    unit.write_bytes(
        systemd_unit(Service("headrace", (sys.executable, *WORDS[1:]), user=user, folder=str(tmp_path)))
    )
    text = unit.read_text()
    assert 'a\\"b%%c$$d' in text and '"/models/with space"' in text
    assert ("WantedBy=default.target" in text) == user and ("DynamicUser=true" in text) == (not user)
    own = ("StateDirectory=headrace", "HEADRACE_STATE=/var/lib/headrace", "HEADRACE_CACHE=/var/cache/headrace")
    assert all((line in text) == (not user) for line in own)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here to ask")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    about_unit = [line for line in done.stderr.splitlines() if "headrace.service" in line]
    assert done.returncode == 0 or not about_unit, done.stderr


def test_places_by_system() -> None:
    home = Path("/home/x")
    daemon, agent = Service("h", WORDS, user=False), Service("h", WORDS, user=True)
    assert default_path("darwin", daemon, home) == Path("/Library/LaunchDaemons/io.headrace.h.plist")
    assert default_path("darwin", agent, home) == home / "Library/LaunchAgents/io.headrace.h.plist"
    assert default_path("linux", daemon, home) == Path("/etc/systemd/system/h.service")
    assert default_path("linux", agent, home) == home / ".config/systemd/user/h.service"


def test_a_file_is_written_once_more_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "units" / "headrace.service"
    keys = tmp_path / "keys"
    keys.write_text("k" * 40)
    words = ["install", "--path", str(path), "--", "--port", "8123", "--api-key-file", str(keys)]
    assert service.run(words) == 0 and service.run(words) == 0
    assert "8123" in path.read_text() and service.MARK in path.read_text()
    assert service.run(["uninstall", "--path", str(path)]) == 0
    assert not path.exists()
    assert service.run(["uninstall", "--path", str(path)]) == 1
    assert service.run(["status", "--path", str(path)]) == 1
    assert "not installed" in capsys.readouterr().out


def test_a_dry_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.service"
    assert service.run(["install", "--dry-run", "--path", str(path), "--", "--port", "8123"]) == 0
    assert "8123" in capsys.readouterr().out and not path.exists()


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.service"
    place = ["install", "--path", str(path)]
    with pytest.raises(StartupError, match="--api-key-file"):
        service.run([*place, "--", "--api-key", "secret"])
    with pytest.raises(UsageError):
        service.run([*place, "--", "--no-such-flag"])
    with pytest.raises(StartupError, match="contradict"):
        service.run([*place, "--user", "--account", "x"])
    path.write_text("somebody else's")
    for words in (place, ["uninstall", "--path", str(path)]):
        with pytest.raises(StartupError, match="not written by this command"):
            service.run(words)
    assert path.read_text() == "somebody else's"
