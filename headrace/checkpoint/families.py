"""Which model types can be loaded, found without importing MLX."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from headrace.errors import ModelFileError

# Model types that share another type's model file (the same table as mlx-lm's; a test compares them).
ALIASES: Final = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}
ARCHITECTURE_ALIASES: Final = {("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"}

_MODEL: Final = re.compile(r"^(class Model\(|from \.\w+ import Model\b)", re.MULTILINE)


@cache
def model_files() -> frozenset[str]:
    """Names of mlx-lm's model files that define a ``Model`` class."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        raise ModelFileError("mlx-lm is not installed: no model type is known")
    folder = Path(spec.submodule_search_locations[0]) / "models"
    return frozenset(path.stem for path in folder.glob("*.py") if _MODEL.search(path.read_text("utf-8")))


def model_file(config: Mapping[str, Any]) -> str:
    """The model file that defines ``config``'s architecture; an unknown type is a ``ModelFileError``."""
    model_type = str(config["model_type"])
    architectures = config.get("architectures") or ()
    if isinstance(architectures, str):
        architectures = (architectures,)
    name = ALIASES.get(model_type, model_type)
    for architecture in architectures:
        name = ARCHITECTURE_ALIASES.get((model_type, str(architecture)), name)
    if name not in model_files():
        raise ModelFileError(f"config.json: model_type {model_type!r} is not supported")
    return name
