"""Fixtures: the application over a scripted engine and the scripted checkpoint's text side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_harness import CONFIG, Api

from headrace.text import model_text
from headrace.text.model_text import ModelText


@pytest.fixture(scope="session")
def text_side(scripted_folder: Callable[[str], Path]) -> ModelText:
    return model_text.load(scripted_folder("plain"))


@pytest.fixture
def make_api(text_side: ModelText) -> Iterator[Callable[..., Api]]:
    """``make_api(engine=…, field=value…)``: an application with these fields of ``ServerConfig`` changed."""
    made: list[Api] = []

    def make(engine: Any = None, **changes: Any) -> Api:
        made.append(Api(text_side, msgspec.structs.replace(CONFIG, **changes), engine))
        return made[-1]

    yield make
    for api in made:
        api.close()


@pytest.fixture
def api(make_api: Callable[..., Api]) -> Api:
    return make_api()
