"""Schemathesis reads the server's own OpenAPI document and sends what it allows and what it forbids: no 5xx."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from outside_tools import clean_environment, python_tools
from support.server import Serve, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# Left out: a reload ends what runs; while the worker loads, 503 is the right answer to everything.
LEFT_OUT = ("/v1/models/reload",)


@pytest.fixture(scope="session")
def schemathesis() -> Path:
    return python_tools("schemathesis>=4.32,<5") / "st"


def pinned_document(server: Server) -> dict[str, Any]:
    """The document with ``model`` fixed to the name that is served; any other name is a 404 and proves little."""
    document: dict[str, Any] = server.client.get("/openapi.json").json()
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": server.model}
    return document


def test_no_request_that_the_document_describes_is_a_server_error(
    schemathesis: Path, serve: Serve, tmp_path: Path
) -> None:
    server = serve("plain", "--max-request-tokens", "8")
    description = tmp_path / "openapi.json"
    description.write_text(json.dumps(pinned_document(server)))
    words = [
        *(str(schemathesis), "run", str(description), "--url", server.url),
        *("--checks", "not_a_server_error,response_schema_conformance", "--continue-on-failure"),
        *("--phases", "coverage,fuzzing", "--max-examples", "20"),
        *("--generation-deterministic", "--warnings", "off"),
        *(word for path in LEFT_OUT for word in ("--exclude-path", path)),
    ]
    done = subprocess.run(
        words, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2000:]
    server.wait_idle()


def test_path_parameters_are_declared(serve: Serve) -> None:
    paths = serve("plain", "--max-request-tokens", "8").client.get("/openapi.json").json()["paths"]
    for path, operations in paths.items():
        named = {part.strip("{}") for part in path.split("/") if part.startswith("{")}
        for operation in operations.values():
            assert {parameter["name"] for parameter in operation.get("parameters", ())} == named, path
