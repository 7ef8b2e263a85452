"""A family of one's own: what it computes and what its tensors are called, and nothing else."""

import json

import pytest
from safetensors.torch import load_file, save_file
from torch import nn

from snapstream import CacheBudget, CheckpointError, ConfigurationError
from snapstream.kernels.buffers import BufferView
from snapstream.models import attention, families
from snapstream.models.families import llama
from snapstream.models.families.family import Family
from snapstream.models.layers import FeedForward, Result, RMSNorm
from snapstream.models.names import gated_places, norm_places
from snapstream.models.weights import load_spec
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
        normed = BufferView("normed", x.size)
        yield self.norm.operation(x, normed)
        result = Result(x, add=True)
        yield from self.attention.operations(layer, normed, result, angles)
        yield from self.feed_forward.operations(normed, result)


def places(source, target, spec, layer):
    return (
        norm_places(source, target, spec, input_layernorm="norm")
        | attention.attention_places(f"{source}.self_attn", f"{target}.attention", spec, layer)
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


def spec_of(tmp_path, family, **changes):
    save_checkpoint(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return load_spec(tmp_path)


def test_layers_keep_their_rotation_where_the_window_is_as_long_as_any_text(tmp_path):
    groups = spec_of(tmp_path, "gemma3", sliding_window=4096).groups
    assert [(group.window, group.rotation) for group in groups] == [
        (None, "full_attention"),
        (None, "sliding_attention"),
    ]


def test_gemma_states_the_length_after_scaling(tmp_path):
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    sets = {"full_attention": scaled, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert spec_of(tmp_path / "gemma", "gemma3", rope_parameters=sets).max_position == 4096
    assert spec_of(tmp_path / "llama", "llama2", rope_parameters=scaled).max_position == 8 * 4096


def test_saved_sequences_belong_to_one_set_of_frequencies(tmp_path):
    """Keys of Phi's short sequences are rotated by other angles than those of long ones."""
    save_checkpoint(tmp_path, "phi3")
    save_tokenizer(tmp_path)
    models = {length: make(tmp_path, max_model_len=length).engine.files.model for length in (60, 64, 65, 200)}
    assert models[60] == models[64] != models[65] == models[200]


def test_what_a_family_cannot_do_is_said(tmp_path):
    for name, family, changes, said in (
        ("clip", "olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ("both", "gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("hybrid", "granite-dense", {"layer_types": ["mamba", "attention"]}, "layers of type"),
        ("experts", "granite-dense", {"num_local_experts": 4}, "with experts is not supported"),
        ("many", "mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ("act", "glm4", {"hidden_act": "relu"}, "activation 'relu' is not supported; supported: silu"),
    ):
        with pytest.raises(CheckpointError, match=said):
            spec_of(tmp_path / name, family, **changes)
    save_checkpoint(tmp_path / "glm", "glm4-moe")
    with pytest.raises(ConfigurationError, match="multi-token prediction of Glm4MoeForCausalLM is not supported"):
        make(tmp_path / "glm", speculative="mtp")
