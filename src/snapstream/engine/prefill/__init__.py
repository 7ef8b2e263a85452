"""Prefill: prompts pass through the model layer by layer, and each layer is compressed into a slot."""
