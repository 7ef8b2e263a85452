"""Files whose rotation is scaled: frequencies as transformers has them, and the longer context that follows."""

import pytest
import torch

pytest.importorskip("gguf")

from snapstream import LLM, CheckpointError
from snapstream.models.weights import load_spec
from tests.models.gguf.files import write
from tests.models.gguf.test_gguf import logits_of


def scaled(kind=None, factor="rope.scaling.factor", **more):
    """A change of a file: a factor of 4, with the kind of scaling if it is said, and other numbers."""

    def change(writer):
        if kind is not None:
            writer.add_string("qwen2.rope.scaling.type", kind)
        writer.add_float32(f"qwen2.{factor}", 4.0)
        for name, value in more.items():
            add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"qwen2.rope.scaling.{name}", value)

    return change


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("change", "parameters", "longest"),
    [
        (scaled("yarn", original_context_length=256), YARN | {"original_max_position_embeddings": 256}, 1024),
        (scaled("yarn"), YARN | {"original_max_position_embeddings": 512}, 2048),
        (
            scaled("yarn", original_context_length=256, yarn_beta_fast=16.0, yarn_beta_slow=2.0),
            YARN | {"original_max_position_embeddings": 256, "beta_fast": 16.0, "beta_slow": 2.0},
            1024,
        ),
        (scaled("linear"), LINEAR, 2048),
        (scaled(), LINEAR, 2048),
        (scaled(factor="rope.scale_linear"), LINEAR, 2048),
    ],
)
def test_scaled_rotation_lengthens_the_context(tmp_path, change, parameters, longest):
    path = tmp_path / "model.gguf"
    peer = write(
        path, "qwen2", change=change, max_position_embeddings=512, rope_parameters={**parameters, "rope_theta": 5e5}
    )
    assert load_spec(path).max_position == longest
    assert LLM(str(path), max_model_len=longest, slots=1).engine.max_model_len == longest
    tokens = [5 * n % 250 for n in range(600)]
    with torch.no_grad():
        want = peer(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_of(path, tokens), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("factor", [0.5, float("nan"), -4.0])
def test_a_factor_that_is_none(tmp_path, factor):
    write(
        tmp_path / "model.gguf", "qwen2", change=lambda writer: writer.add_float32("qwen2.rope.scaling.factor", factor)
    )
    with pytest.raises(CheckpointError, match="the factor of RoPE scaling is"):
        load_spec(tmp_path / "model.gguf")
