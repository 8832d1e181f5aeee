"""The engine on a scripted checkpoint with native operations and without: known text either way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import scripted
from test_scripted_serving import ENDS, Serving, build, prompt, said

from headrace.params import SamplingParams
from headrace.request import EngineRequest
from headrace.runner import build as building
from headrace.runner.cpu.operations import load_operations


@pytest.mark.slow
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("variant", ["plain", "swa64"])
def test_text_is_exact(
    scripted_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, variant: str, native: bool
) -> None:
    if not native:
        monkeypatch.setattr(building, "load_operations", lambda: None)
    elif load_operations() is None:
        pytest.skip("the native operations cannot be built here")
    built = build(scripted_folder(variant), "auto", blocks=120)
    label = built.ready_info.attention
    assert label.startswith("native paged attention") if native else label.startswith("reference attention")
    serving = Serving(built)
    scripts = ["s00", "s01", "s02", "s00", "s07", "s01"]
    for number, script in enumerate(scripts):
        request = EngineRequest(
            id=f"r{number}",
            prompt_token_ids=prompt(script, "x" * 7 * number, "y" * number),
            params=SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=ENDS),
            n=1 + number % 2,
        )
        serving.add(request)
    while serving.step():
        pass
    for (name, _), tokens in serving.tokens.items():
        assert said(tokens) == scripted.expected_pieces(scripts[int(name[1:])], 30)
