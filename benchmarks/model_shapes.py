"""Models of the shapes in shapes.py with random weights: speed does not depend on what the weights are."""

from __future__ import annotations

import importlib

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from shapes import SHAPES


def random_model(name: str, *, bits: int = 16) -> nn.Module:
    """The named shape in bfloat16, or packed to ``bits`` (4, 8) with group size 64."""
    config = SHAPES[name]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    weights = [(path, value) for path, value in tree_flatten(model.parameters())]
    mx.random.seed(0)
    made = []
    for path, value in weights:
        if value.ndim > 1:
            array = (mx.random.normal(value.shape, dtype=mx.bfloat16) * 0.02).astype(mx.bfloat16)
        else:
            array = mx.ones(value.shape, mx.bfloat16)
        mx.eval(array)
        made.append((path, array))
    model.update(tree_unflatten(made))
    if bits < 16:
        nn.quantize(model, group_size=64, bits=bits)
    mx.eval(model.parameters())
    return model


def unpacked(name: str, model: nn.Module) -> nn.Module:
    """The named shape with the packed weights of ``model`` as bfloat16."""
    module = importlib.import_module(f"mlx_lm.models.{SHAPES[name]['model_type']}")
    plain: nn.Module = module.Model(module.ModelArgs.from_dict(SHAPES[name]))
    packed = dict(tree_flatten(model.parameters()))
    groups = {path.removesuffix(".scales") for path in packed if path.endswith(".scales")}
    layers = dict(model.named_modules())
    made = []
    for path, value in packed.items():
        owner, _, part = path.rpartition(".")
        if owner not in groups:
            made.append((path, value))
        elif part == "weight":
            layer = layers[owner]
            scales, biases = packed[f"{owner}.scales"], packed[f"{owner}.biases"]
            array = mx.dequantize(value, scales, biases, group_size=layer.group_size, bits=layer.bits)
            mx.eval(array)
            made.append((path, array))
    plain.update(tree_unflatten(made))
    return plain


def step_bytes(name: str, model: nn.Module, rows: int) -> int:
    """Bytes of weights that a decode step of ``rows`` rows reads at least, on average.

    An embedding that is not the head too is read by the row. Of ``E`` experts, ``k`` a row, a share of
    ``1 - (1 - k / E) ** rows`` is read when rows choose independently and evenly.
    """
    config = SHAPES[name]
    experts = config.get("num_experts", 0)
    share = 1 - (1 - config["num_experts_per_tok"] / experts) ** rows if experts else 1.0
    total = 0.0
    for path, value in tree_flatten(model.parameters()):
        if "embed_tokens" in path and not config["tie_word_embeddings"]:
            total += value.nbytes * rows / config["vocab_size"]
        else:
            total += value.nbytes * (share if "switch_mlp" in path else 1.0)
    return int(total)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))
