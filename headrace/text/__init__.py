"""Text room: everything between characters and token ids. No MLX, no transformers."""
