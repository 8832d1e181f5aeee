"""A program: last hidden states and yes/no scores of the demo model from mlx-lm, one text at a time.

Standard input: ``{"model": path of the GGUF file, "texts": [[token id]], "judged": [[token id]], "yes": id,
"no": id}``.
Standard output: ``{"states": [unit vector per text], "scores": [p(yes) / (p(yes) + p(no)) per judged text]}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from mlx_lm_greedy import load

import mlx.core as mx  # isort: skip  # behind the choice of the BLAS


def answer(request: dict[str, Any]) -> dict[str, Any]:
    model = load(request["model"])
    states, scores = [], []
    for text in request["texts"]:
        state = model.model(mx.array([text]))[0, -1].astype(mx.float32)
        states.append((state / mx.linalg.norm(state)).tolist())
    for text in request["judged"]:
        logits = model(mx.array([text]))[0, -1].astype(mx.float32)
        scores.append(mx.sigmoid(logits[request["yes"]] - logits[request["no"]]).item())
    return {"states": states, "scores": scores}


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
