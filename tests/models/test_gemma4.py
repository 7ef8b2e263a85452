"""What of Gemma 4 no published model has, but its configurations allow."""

import pytest
import torch
import transformers

from snapstream.attention import SdpaAttention
from snapstream.errors import CheckpointError
from snapstream.models import logits_of
from snapstream.models.families import read_spec
from snapstream.models.weights import load_model, load_spec
from tests.checkpoints import GEMMA4, SMALL, prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_engine import greedy, make

CPU = torch.device("cpu")


def check_logits(checkpoint, peer):
    model, tokens = load_model(checkpoint, load_spec(checkpoint), torch.float32, CPU), torch.tensor(prompt(60))
    with torch.no_grad():
        want = peer(tokens[None]).logits[0]
    torch.testing.assert_close(logits_of(model, tokens), want, rtol=1e-3, atol=1e-3)


def test_experts_wide_blocks_and_shared_caches_together(tmp_path):
    more = {"use_double_wide_mlp": True, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32}
    types = GEMMA4["layer_types"] * 2
    check_logits(tmp_path, save_checkpoint(tmp_path, "gemma4-moe", num_hidden_layers=4, layer_types=types, **more))


def test_the_unified_model_for_texts_alone(tmp_path):
    config = transformers.Gemma4UnifiedTextConfig(**SMALL | GEMMA4 | {"attention_k_eq_v": True})
    peer = transformers.Gemma4UnifiedForCausalLM(config).eval()
    peer.save_pretrained(tmp_path)
    check_logits(tmp_path, peer)


def test_keys_in_a_checkpoint_for_layers_that_have_none(tmp_path):
    """As published ones have them: they are not read."""
    from safetensors.torch import load_file, save_file

    peer = save_checkpoint(tmp_path, "gemma4-shared")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for part in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.5.self_attn.{part}.weight"] = torch.ones(3)
    save_file(tensors, file, {"format": "pt"})
    check_logits(tmp_path, peer)


def test_shares_of_nothing_are_refused():
    config = transformers.Gemma4TextConfig(**SMALL | GEMMA4)
    config.num_kv_shared_layers, config.architectures = 1, ["Gemma4ForCausalLM"]
    with pytest.raises(CheckpointError, match="no layer with one has"):
        read_spec(config)


@pytest.mark.parametrize("weights", ["q8_0", "q4_0"])
def test_inputs_of_layers_that_blocks_do_not_fit(tmp_path, weights):
    """Their projection is then a tensor of numbers: a layer reads a part of its rows."""
    save_checkpoint(tmp_path, "gemma4-shared", hidden_size_per_layer_input=24)
    save_tokenizer(tmp_path)
    llm = make(tmp_path, 48, weights=weights, max_model_len=200, slots=1)
    assert llm.engine.model_runner.decoder.model.layer_inputs.projection.weight.stored_as[0].format is None
    (output,) = llm.generate([prompt(80)], greedy(5))
    assert len(output.token_ids) == 5


def test_heads_that_are_too_small_for_the_kernels(tmp_path):
    """The larger ones would fit."""
    save_checkpoint(tmp_path, "gemma4", head_dim=16, global_head_dim=32)
    save_tokenizer(tmp_path)
    llm = make(tmp_path, 48, max_model_len=200, slots=1, device="cpu")
    assert isinstance(llm.engine.model_runner.decoder.backend, SdpaAttention)
    (output,) = llm.generate([prompt(80)], greedy(5))
    assert len(output.token_ids) == 5
