"""What makes MLX's CPU backend quick: a BLAS, narrow weights, native operations."""
