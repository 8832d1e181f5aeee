"""Reads model files on disk without MLX and without loading weights: headers, configuration, what fits."""
