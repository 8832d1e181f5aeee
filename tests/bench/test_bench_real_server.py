"""The walk-through's command against a real server with the demo model, with smaller numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_bench_serve import check_figures

from headrace.cli.main import main

Serve = Callable[..., Any]


@pytest.mark.slow
def test_the_walk_through_on_the_demo_model(start_server: Serve, tmp_path: Path) -> None:
    server = start_server("demo", "--max-num-seqs", "8")
    output = tmp_path / "bench.json"
    words = (
        f"bench-serve --url {server.url} --model m --prompts short,96 --concurrency 1,2 --max-tokens 8 "
        f"--repetitions 2 --scrape-metrics true --format json --output {output} --ignore-eos --num-requests 2"
    )
    code = main(words.split())
    report = json.loads(output.read_text())
    assert code == 0 and len(report["cells"]) == 4
    assert report["meta"]["server"]["device"]
    assert report["meta"]["prompt_lengths"] == "server's tokenizer"
    for cell in report["cells"]:
        check_figures(cell)
        figures, metrics = cell["figures"], cell["server"]
        assert (figures["completed"], figures["failed"], figures["estimated"]) == (4, {}, 0)
        assert figures["output_tokens"] == 4 * 8
        wished = 64 if cell["prompts"] == "short" else 96
        assert cell["prompt_tokens_exact"] and figures["prompt_tokens"] == 4 * wished
        assert metrics["peak_memory_bytes"] > 0 and metrics["queue_wait_s"]["mean"] is not None
        assert 0 <= metrics["kv_usage_max"] <= 1 and 0 <= metrics["cache_hit_rate"] < 1
    counted = server.metrics()
    assert counted.generated >= 4 * 4 * 8
