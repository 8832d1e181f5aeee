"""Forwards as steps run them: traced, recorded, split, with logits where they are wanted."""
