"""Experts that are stored as one tensor per layer: gpt-oss in four bits, as it is published."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from snapstream.errors import CheckpointError
from snapstream.models import joined, logits_of
from snapstream.models.weights import load_model, load_spec
from tests.checkpoints import save_checkpoint

PRODUCTS = ("gate_up_proj", "down_proj")


def random_blocks(shape, seed):
    """Any numbers, and scales around 1/8."""
    generator = torch.Generator().manual_seed(seed)
    *rows, columns = shape
    blocks = torch.randint(0, 256, (*rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(121, 126, (*rows, columns // 32), dtype=torch.uint8, generator=generator)


def save_in_blocks(directory, *, apart=False):
    """A checkpoint as it is published; returns transformers' model with the numbers that transformers makes of it.

    apart: Scales are in another file than blocks.
    """
    model = save_checkpoint(directory, "gpt-oss")
    tensors = load_file(directory / "model.safetensors")
    state, scales = model.state_dict(), {}
    for layer in range(model.config.num_hidden_layers):
        for number, product in enumerate(PRODUCTS):
            name = f"model.layers.{layer}.mlp.experts.{product}"
            wide = tensors.pop(name).transpose(1, 2)
            tensors[f"{name}_blocks"], scales[f"{name}_scales"] = random_blocks(wide.shape, 9 * layer + number)
            numbers = convert_moe_packed_tensors(tensors[f"{name}_blocks"], scales[f"{name}_scales"])
            state[name].copy_(numbers.float())
    if apart:
        (directory / "model.safetensors").unlink()
        parts = {"model-00001-of-00002.safetensors": scales, "model-00002-of-00002.safetensors": tensors}
        for file, own in parts.items():
            save_file(own, directory / file)
        places = {name: file for file, own in parts.items() for name in own}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        save_file(tensors | scales, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (directory / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("apart", [False, True])
def test_four_bits_equal_transformers(tmp_path, apart):
    peer = save_in_blocks(tmp_path, apart=apart)
    model = load_model(tmp_path, load_spec(tmp_path), torch.float32, torch.device("cpu"))
    tokens = torch.arange(5, 75)
    with torch.no_grad():
        want = peer(tokens[None]).logits[0]
    torch.testing.assert_close(logits_of(model, tokens), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_numbers_are_transformers_to_the_bit():
    blocks, scales = random_blocks((3, 40, 96), seed=0)
    want = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    for expert in range(3):
        assert torch.equal(joined.widen(blocks[expert], scales[expert]), want[expert].float())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "gate_up_proj_scales is missing"),
        (lambda tensors, name: tensors.pop(f"{name}_blocks"), "missing: .*gate_proj.weight"),
        (lambda tensors, name: tensors.pop(f"{name}_bias"), "missing: .*gate_proj.bias"),
        (
            lambda tensors, name: tensors.update(
                {f"{name}_{kind}": tensors[f"{name}_{kind}"][:, :10].clone() for kind in ("blocks", "scales")}
            ),
            "of the wrong shape: .*gate_proj.weight is",
        ),
        (
            lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][:, :10].clone()}),
            "gate_up_proj_scales is .*, expected",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(tmp_path, change, said):
    save_in_blocks(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors, "model.layers.1.mlp.experts.gate_up_proj")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        load_model(tmp_path, load_spec(tmp_path), torch.float32, torch.device("cpu"))
