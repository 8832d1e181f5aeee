"""The Grafana dashboard and the Prometheus example of the docs fit what a real server exposes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.server import Serve

DOCS = Path(__file__).resolve().parents[2] / "docs"
DASHBOARD = DOCS / "grafana" / "headrace.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

SELECTOR = re.compile(r"\b((?:vllm|headrace):\w+)\{([^}]*)\}")
NAME = re.compile(r"\b(?:vllm|headrace):\w+")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
GROUPING = re.compile(r"\bby \(([^)]*)\)")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def targets(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in dashboard["panels"]:
        yield from panel.get("targets", ())


def test_panels_have_ids_places_and_the_chosen_source(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids) > 20
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert variables["model"]["datasource"] == SOURCE
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == SOURCE and panel["description"] and panel["targets"]
    assert all(target["datasource"] == SOURCE for target in targets(dashboard))


def test_every_query_is_of_one_model_and_balanced(dashboard: dict[str, Any]) -> None:
    for target in targets(dashboard):
        query = target["expr"]
        assert len(NAME.findall(query)) == len(SELECTOR.findall(query)) >= 1, query
        assert all('model=~"$model"' in labels for _, labels in SELECTOR.findall(query)), query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
        for call in re.findall(r"\b(?:rate|increase)\(([^()]*)\)", query):
            assert call.endswith("[$__rate_interval]"), query
            assert re.match(r"[\w:]+_(total|bucket|sum|count)\{", call), query


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_metric_and_label_exists(dashboard: dict[str, Any], serve: Serve) -> None:
    samples: dict[str, list[dict[str, str]]] = {}
    for family in serve("plain").metrics().families.values():
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample.labels)
    for target in targets(dashboard):
        query, seen = target["expr"], set[str]()
        for name, labels in SELECTOR.findall(query):
            assert name in samples, f"no such metric: {name}"
            for label, how, value in MATCHER.findall(labels):
                values = {found[label] for found in samples[name]}
                assert "$" in value or (
                    value in values if how == "=" else any(re.fullmatch(value, v) for v in values)
                )
            seen |= samples[name][0].keys()
        groups = {label.strip() for group in GROUPING.findall(query) for label in group.split(",")}
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) if "legendFormat" in target else set()
        assert groups <= seen and shown <= groups, query
    (variable,) = [v for v in dashboard["templating"]["list"] if v["type"] == "query"]
    name, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
    assert label in samples[name][0] and variable["query"]["query"] == variable["definition"]


def test_the_scrape_example_is_a_configuration() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / "metrics.md").read_text(), re.DOTALL)
    (job,) = yaml.safe_load(blocks[0])["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    assert job["authorization"]["credentials"]
    assert "metrics_path" not in job  # Prometheus' own default is ours
