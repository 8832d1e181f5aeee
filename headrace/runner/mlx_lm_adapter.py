"""Every use that Headrace makes of mlx-lm's internals, in one place.

mlx-lm gives model definitions. What we rely on beyond calling them is listed here, one function each, and
checked by the runner's tests against the pinned version:

- a model's ``make_cache`` (or its layer count) tells which cache each layer wants;
- every ``mlx_lm.models.*`` module that attends through the shared function holds it under the name
  ``scaled_dot_product_attention``, looked up at call time, so rebinding the name redirects attention;
- importing it sets the process's limit on open files (to 2048, the hard one to 4096): an error for a process
  that may open fewer, a loss for one that may open more.

Other modules take mlx-lm's classes from here, so that it is imported once and without that.
"""

from __future__ import annotations

import copy
import importlib
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from headrace.errors import ModelFileError


@contextmanager
def _limits_kept() -> Iterator[None]:
    """Who sets the process's limits inside is not heard."""
    set_limit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = set_limit


with _limits_kept():
    from mlx_lm import utils as _utils
    from mlx_lm.models import base as _base
    from mlx_lm.models import cache as _cache
    from mlx_lm.models.activations import SwigluOAI
    from mlx_lm.models.rope_utils import Llama3RoPE
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear

__all__ = ["Llama3RoPE", "QuantizedSwitchLinear", "SwiGLU", "SwigluOAI", "SwitchGLU", "SwitchLinear"]

ATTENTION_NAME = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class CacheKind:
    """What one entry of a model's cache list is.

    Attributes:
        kind: "full" (every position), "sliding" (a window), "recurrent" (fixed-size state) or "other".
        window: positions seen, own included, for "sliding".
        name: mlx-lm's class name, for messages.
    """

    kind: Literal["full", "sliding", "recurrent", "other"]
    window: int | None
    name: str


def cache_kinds(model: nn.Module) -> tuple[CacheKind, ...]:
    """One ``CacheKind`` per entry of the cache list that ``model`` expects."""
    return tuple(_kind_of(entry) for entry in _cache.make_prompt_cache(model))


def _kind_of(entry: Any) -> CacheKind:
    name = type(entry).__name__
    if type(entry) is _cache.KVCache:
        return CacheKind("full", None, name)
    if type(entry) is _cache.RotatingKVCache and entry.keep == 0:
        return CacheKind("sliding", int(entry.max_size), name)
    if type(entry) is _cache.ArraysCache:
        return CacheKind("recurrent", None, name)
    return CacheKind("other", None, name)


def one_sequence_cache(model: nn.Module) -> list[Any]:
    """mlx-lm's own cache for one sequence: the reference that tests and self-checks compare with."""
    return list(_cache.make_prompt_cache(model))


def bind_attention(dispatcher: Callable[..., mx.array]) -> int:
    """Rebind the attention function in every loaded mlx-lm model module; returns how many were rebound.

    The modules look the name up in their globals at each call, so this redirects already built models too.
    """
    count = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, ATTENTION_NAME):
            setattr(module, ATTENTION_NAME, dispatcher)
            count += 1
    return count


def bound_attention(module: nn.Module) -> Callable[..., mx.array] | None:
    """The attention function that ``module``'s own code would call now; None where its file does not hold one."""
    function: Callable[..., mx.array] | None = getattr(sys.modules[type(module).__module__], ATTENTION_NAME, None)
    return function


def current_attention() -> Callable[..., mx.array]:
    """The shared attention function as it is bound now."""
    function: Callable[..., mx.array] = getattr(_base, ATTENTION_NAME)
    return function


def original_attention() -> Callable[..., mx.array]:
    """The shared attention function as mlx-lm defines it (of a module nobody rebinds twice)."""
    function = getattr(_base, ATTENTION_NAME)
    return getattr(function, "wrapped", function)  # type: ignore[no-any-return]


# -- building models -----------------------------------------------------------------------------------


def build_model(model_file: str, config: dict[str, Any]) -> nn.Module:
    """mlx-lm's module for ``config``, parameters lazy; ModelFileError when the configuration does not do."""
    try:
        module = importlib.import_module(f"mlx_lm.models.{model_file}")
        model: nn.Module = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))
    except SystemExit:  # one model file ends the process when its own package is missing
        raise ModelFileError(f"config.json: model_type {config['model_type']!r} needs a package we lack") from None
    except ImportError as error:
        raise ModelFileError(f"config.json: model_type {config['model_type']!r}: {error}") from None
    except TypeError as error:
        missing = re.search(r"required positional arguments?: (.*)", str(error))
        what = f"missing {missing[1]}" if missing else str(error)
        raise ModelFileError(f"config.json: {what} (model_type {config['model_type']})") from None
    except (ValueError, KeyError, AttributeError, ZeroDivisionError, IndexError, AssertionError) as error:
        raise ModelFileError(f"config.json: {error} (model_type {config['model_type']})") from None
    return model.eval()


def sanitize(model: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The model's own renaming of checkpoint tensors; lazy. ModelFileError when a tensor it needs is missing."""
    rename = getattr(model, "sanitize", None)
    if rename is None:
        return weights
    try:
        renamed: dict[str, mx.array] = rename(weights)
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise ModelFileError(f"incomplete: the weights do not fit config.json: {error}") from None
    return renamed


def cast_predicate(model: nn.Module) -> Callable[[str], bool]:
    """Which parameters (by path) may change their dtype; models list those that must not."""
    predicate: Callable[[str], bool] = getattr(model, "cast_predicate", lambda path: True)
    return predicate


def repack_awq(weights: dict[str, mx.array], settings: dict[str, Any]) -> dict[str, mx.array]:
    """AutoAWQ's packed tensors in MLX's packing (``.weight``, ``.scales``, ``.biases``), others kept; lazy."""
    repacked: dict[str, mx.array] = _utils._transform_awq_weights(weights, settings)[0]
    return repacked
