"""A family of one's own: what it computes and what its tensors are called, and nothing else."""

import json

import pytest
from safetensors.torch import load_file, save_file
from torch import nn

from snapstream import CacheBudget, CheckpointError
from snapstream.kernels.parts import Part
from snapstream.models import attention, families
from snapstream.models.families import llama
from snapstream.models.families.family import Family
from snapstream.models.layers import FeedForward, Result, RMSNorm
from snapstream.models.names import gated_places, norm_places
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_engine import greedy, make, naive_generate


class ParallelBlock(nn.Module):
    """Attention and feed-forward from the same norm, side by side."""

    def __init__(self, spec, layer):
        super().__init__()
        self.norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.attention = attention.GroupedAttention(spec, layer)
        self.feed_forward = FeedForward(spec.hidden_size, spec.intermediate_size)

    def operations(self, layer, x, angles):
        normed = Part("normed", x.size)
        yield self.norm.operation(x, normed)
        result = Result(x, add=True)
        yield from self.attention.operations(layer, normed, result, angles)
        yield from self.feed_forward.operations(normed, result)


def places(source, target, spec, layer):
    return (
        norm_places(source, target, spec, input_layernorm="norm")
        | attention.attention_places(f"{source}.self_attn", f"{target}.attention", spec)
        | gated_places(f"{source}.mlp", f"{target}.feed_forward", spec.hidden_size, spec.intermediate_size)
    )


PARALLEL = Family(("ParallelForCausalLM",), llama.LLAMA.fields, ParallelBlock, places)


@pytest.fixture
def checkpoint(tmp_path):
    """A Llama without its second norms, under another name."""
    save_checkpoint(tmp_path, "llama3-gqa")
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["ParallelForCausalLM"]}))
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "post_attention_layernorm" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_a_new_family_runs(checkpoint, monkeypatch):
    """Chunks of a prompt, compression and decoding, with kernels and without, as the naive decoder has it."""
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, PARALLEL))
    budget = CacheBudget(sink=4, recent=24, top_k=20, window=8, kernel=5)
    want = naive_generate(checkpoint, prompt(100), budget, 60)
    params = [greedy(60), greedy(60, prompt_logprobs=2)]
    for settings in ({}, {"attention": "sdpa"}, {"dtype": "float32", "speculative": "lookup"}):
        outputs = make(checkpoint, budget, **settings).generate([prompt(100)] * 2, params)
        assert [each.token_ids for each in outputs] == [want, want]


def test_other_architectures_are_refused(checkpoint):
    with pytest.raises(CheckpointError, match="architecture ParallelForCausalLM is not supported; supported: Llama"):
        make(checkpoint)
