"""Kernels and native operations of our own: their language, compilers, and recordings of what MLX launches."""
