"""From logits to tokens: the definition, MLX's operations, kernels, grammar masks."""
