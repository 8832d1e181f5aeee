"""Headrace: an LLM inference server on MLX for several users at once."""

__version__ = "0.1.0"
