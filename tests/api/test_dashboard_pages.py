"""The dashboard's files: all there, served to anybody, with headers and contents that let nothing foreign in."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from http_harness import Api

import headrace.api.dashboard
from headrace.api.dashboard.pages import FOLDER, TYPES, read_files
from headrace.config import ApiKey

STATIC = Path(headrace.api.dashboard.__file__).parent / "static"
FILES = read_files()
SCRIPTS = {path: file.content.decode() for path, file in FILES.items() if path.endswith(".js")}
PAGE = FILES["/"].content.decode()


def test_every_file_is_served_and_packaged() -> None:
    names = sorted(path.name for path in STATIC.iterdir())
    assert sorted("index.html" if path == "/" else path.removeprefix(FOLDER) for path in FILES) == names
    root = Path(__file__).resolve().parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "headrace"
    ]
    for name in names:
        assert any(fnmatch.fnmatch(f"api/dashboard/static/{name}", pattern) for pattern in patterns), name


def test_what_files_refer_to_is_there() -> None:
    for reference in re.findall(r'(?:href|src)="([^"#]+)"', PAGE):
        assert "/" + reference in FILES, reference
    imported = {path: re.findall(r'from "\./([\w.]+)"', text) for path, text in SCRIPTS.items()}
    for path, names in imported.items():
        assert all(FOLDER + name in FILES for name in names), path
    reached, pending = set(), ["app.js"]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += imported[FOLDER + name]
    assert {FOLDER + name for name in reached} == SCRIPTS.keys() - {FOLDER + "theme.js"}


def test_every_element_that_scripts_name_is_on_the_page() -> None:
    ids = re.findall(r'id="([^"]+)"', PAGE)
    assert len(ids) == len(set(ids))
    named = {
        name for text in SCRIPTS.values() for name in re.findall(r'(?:byId|getElementById)\("([^"]+)"\)', text)
    }
    assert named <= set(ids), named - set(ids)


def test_nothing_inline_nothing_foreign_no_markup_from_text() -> None:
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", PAGE)
    assert not re.search(r"<script(?![^>]*\ssrc=)", PAGE)
    assert "<base" not in PAGE
    for path, file in FILES.items():
        text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|\burl\(|@import", text), path
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text
        ), path
        assert not re.search(r'(?:href|src)="/', text), path


@pytest.mark.parametrize("keys", [(), (ApiKey("ada", "secret-a"),)], ids=["open", "keys"])
def test_headers(make_api: Any, keys: tuple[ApiKey, ...]) -> None:
    api: Api = make_api(api_keys=keys)
    for path in FILES:
        answer = api.send("GET", path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] in TYPES.values()
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "'self' data:",
            "frame-ancestors": "'none'",
            "base-uri": "'none'",
            "form-action": "'none'",
        }
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert api.send("HEAD", path).headers["content-length"] == answer.headers["content-length"]
        again = api.send("GET", path, headers={"if-none-match": f'"x", W/{answer.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == answer.headers["content-security-policy"]
    assert api.send("GET", "/").headers["content-type"].startswith("text/html")
    assert api.send("GET", FOLDER + "none.js").status_code == (401 if keys else 404)
    assert api.send("POST", "/").status_code == 405


def test_the_page_holds_no_data(make_api: Any) -> None:
    api: Api = make_api(api_keys=(ApiKey("ada", "secret-a"),))
    for file in FILES.values():
        assert b"secret-a" not in file.content and b"scripted" not in file.content
    assert api.send("GET", "/").content == FILES["/"].content


def test_files_are_small_and_short() -> None:
    assert sum(len(file.content) for file in FILES.values()) < 100_000
    for path, text in SCRIPTS.items():
        assert len(text.splitlines()) <= 200, path
        assert max(map(len, text.splitlines())) <= 150, path
