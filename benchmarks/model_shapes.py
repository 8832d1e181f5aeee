"""Models of the shapes in shapes.py with random weights: speed does not depend on what the weights are."""

from __future__ import annotations

import importlib

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from shapes import SHAPES

from headrace.runner.substitutions.packed_linear import hold_packed


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


def held_packed(model: nn.Module, *, both: bool) -> nn.Module:
    """``model``, its packed layers held as the server does on CUDA; ``both``: with plain weights beside them."""
    paths = [path for path, module in model.named_modules() if hasattr(module, "bits") and "scales" in module]
    plain = [path for path in paths if both and not path.endswith("embed_tokens")]
    hold_packed(model, paths, plain)
    return model


def twin(name: str, model: nn.Module) -> nn.Module:
    """A second model of the named shape over the arrays of ``model`` (16 bits)."""
    module = importlib.import_module(f"mlx_lm.models.{SHAPES[name]['model_type']}")
    other: nn.Module = module.Model(module.ModelArgs.from_dict(SHAPES[name]))
    other.update(model.parameters())
    return other


def prefill_flops(name: str, model: nn.Module, start: int, tokens: int) -> float:
    """Floating-point operations of a prefill of ``tokens`` tokens behind ``start`` earlier ones.

    Two per weight and token (of experts those that a token chooses; the head at one position only, lookups are
    free), and of causal attention two products of four operations per pair of positions that see each other.
    """
    config = SHAPES[name]
    share = config["num_experts_per_tok"] / config["num_experts"] if "num_experts" in config else 1.0
    total = 0.0
    for path, value in tree_flatten(model.parameters()):
        if "embed_tokens" in path or "lm_head" in path or value.ndim < 2:
            continue
        total += 2.0 * value.size * (share if "switch_mlp" in path else 1.0) * tokens
    total += 2.0 * config["vocab_size"] * config["hidden_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    pairs = tokens * start + tokens * (tokens + 1) / 2
    return total + 4.0 * pairs * heads * head_dim * config["num_hidden_layers"]


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
