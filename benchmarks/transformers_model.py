"""A transformers model for measuring caches: loaded from a checkpoint or a GGUF file, and run in a plain loop."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from snapstream.assets import PACKAGED, TASK_MODEL
from snapstream.models.gguf.configuration import configuration
from snapstream.models.gguf.container import open_container
from snapstream.models.gguf.tokenizer import load_gguf_tokenizer
from snapstream.models.gguf.weights import rows_in_order, sources_of


def model_path(name: str, folder: Path) -> Path:
    """A checkpoint for transformers; a packaged GGUF model is converted and written to ``folder``."""
    if name not in PACKAGED:
        return TASK_MODEL if name == "task-model" else Path(name)
    file = PACKAGED[name].find()
    config = configuration(open_container(file))
    model = LlamaForCausalLM(config)
    stored = open_container(file)
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, source in sources_of(stored, parameters).items():
            parameter = parameters[name]
            order = rows_in_order(stored, name, parameter.shape, config.head_dim)
            rows = torch.from_numpy(stored.rows(source.name, order))
            parameter.copy_(rows.view(parameter.shape))
    model.save_pretrained(folder)
    load_gguf_tokenizer(file).save_pretrained(folder)
    return folder


@torch.no_grad()
def read(model, tokens, cache, context=None):
    """Prefill a prompt; returns the logits of its last token."""
    # kvpress needs cache positions, which newer versions of transformers no longer provide.
    positions = torch.arange(tokens.shape[1])
    with context or contextlib.nullcontext():
        out = model(tokens, past_key_values=cache, logits_to_keep=1, cache_position=positions)
    return out.logits[:, -1]


@torch.no_grad()
def decode(model, logits, cache, length, steps, **more):
    """Decode greedily; positions are passed explicitly, because a pressed DynamicCache does not know them."""
    made = [logits.argmax(-1)]
    for step in range(steps - 1):
        position = torch.full((len(logits), 1), length + step)
        out = model(made[-1][:, None], past_key_values=cache, position_ids=position, **more)
        made.append(out.logits[:, -1].argmax(-1))
    return torch.stack(made, 1)
