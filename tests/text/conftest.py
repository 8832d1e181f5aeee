"""The scripted checkpoint's text side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.text import model_text
from headrace.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def scripted_text(scripted_folder: Callable[[str], Path]) -> Tokenizer:
    return model_text.load(scripted_folder("plain")).tokenizer
