"""Settings that MLX reads from the environment when it is imported. This module does not import it.

On CUDA, MLX records operations as graphs and launches those:

    MLX_CUDA_GRAPH_CACHE_SIZE   the default cache throws when it thrashes and stays broken
    MLX_CUDA_SDPA_CACHE_SIZE    likewise
    MLX_MAX_MB_PER_BUFFER       a graph is cut when its inputs exceed this; KV pools of gigabytes are inputs of
                                every attention, and would cut a decode step into single layers

What a user has set stays.
"""

from __future__ import annotations

import os
import sys

_CUDA = {
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
    "MLX_CUDA_SDPA_CACHE_SIZE": "2000",
    "MLX_MAX_MB_PER_BUFFER": "1000000",
}


def prepare() -> None:
    """Set what is not set. Call before MLX is imported."""
    if sys.platform == "darwin":
        return  # Metal reads the last one too, and its default is right there
    for name, value in _CUDA.items():
        os.environ.setdefault(name, value)
