"""Logits against transformers, for every family, prefilled in chunks and decoded step by step."""

import itertools

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from snapstream.attention import SdpaAttention
from snapstream.kernels import cpu as kernels
from snapstream.kernels.operations import PlainProgram
from snapstream.models import logits_of
from snapstream.models.weights import load_model, load_spec
from tests.attending import logits_with, read_in_chunks, sinks_of
from tests.checkpoints import FAMILIES, make_model, save_checkpoint


class DenseCache:
    """An ordinary cache, one sequence, for driving the model without the engine."""

    def __init__(self, model, length):
        spec = model.spec
        entries = [spec.entry_of(layer) for layer in range(spec.cached_layers)]
        self.keys, self.values = ([torch.zeros(each.heads, length, each.size) for each in entries] for _ in range(2))
        self.start = 0
        self.scale, self.cap, self.sinks = spec.scale, spec.attention_cap, sinks_of(model)
        self.windows = [spec.layer_group(layer).window or 0 for layer in range(spec.cached_layers)]

    def attend(self, layer, query, key, value):
        end = self.start + query.shape[0]
        if key is not None:
            self.keys[layer][:, self.start : end] = key.transpose(0, 1)
            self.values[layer][:, self.start : end] = value.transpose(0, 1)
        start = torch.tensor(self.start)
        given = (query, self.keys[layer], self.values[layer], start, self.scale)
        how = {"window": self.windows[layer], "cap": self.cap, "sinks": self.sinks[layer]}
        return SdpaAttention().prefill(*given, **how)

    def run(self, model, tokens):
        positions = torch.arange(self.start, self.start + len(tokens))
        logits = logits_with(model, tokens, positions, self.attend)
        self.start += len(tokens)
        return logits


@pytest.fixture(scope="module", autouse=True)
def _build_kernels():
    kernels.available()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, tmp_path):
    peer = save_checkpoint(tmp_path, family)
    spec = load_spec(tmp_path)
    model = load_model(tmp_path, spec, torch.float32, torch.device("cpu"))
    tokens = torch.randint(0, 96, (700,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = peer(tokens[None]).logits[0]
        ends = (200, 201, 690, *range(691, 701))
        if spec.has_states:
            got = read_in_chunks(model, tokens, ends, PlainProgram)
        else:
            cache = DenseCache(model, 700)
            got = torch.cat([cache.run(model, tokens[a:b]) for a, b in itertools.pairwise((0, *ends))])
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits_of(model, tokens), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loads_and_agrees(dtype, tmp_path):
    peer = save_checkpoint(tmp_path, "qwen2", initializer_range=0.1, dtype=dtype)
    spec = load_spec(tmp_path)
    assert spec.dtype == dtype
    model = load_model(tmp_path, spec, dtype, torch.device("cpu"))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.rotation_of(0).frequencies.dtype == torch.float32
    tokens = torch.arange(5, 60)
    with torch.no_grad():
        want = peer(tokens[None]).logits[0].float()
    got = logits_of(model, tokens)
    error = (got - want).abs().max() / want.abs().max()
    assert error < 0.03


@pytest.mark.parametrize(
    ("outer", "family", "renamed"),
    [
        *itertools.product(("Gemma3",), ("gemma3",), (False, True)),
        *itertools.product(("Mistral3",), ("mistral", "ministral3", "mistral4"), (False, True)),
        *itertools.product(("Gemma4",), ("gemma4", "gemma4-shared"), (False,)),
        ("Gemma4Unified", "gemma4", False),
        ("Qwen3_5", "qwen3.5", False),
        ("Qwen3_5Moe", "qwen3.5-moe", False),
    ],
)
def test_the_text_model_within_a_model_of_images(outer, family, renamed, tmp_path):
    tied = outer.startswith("Gemma")
    inner = make_model(family, tie_word_embeddings=tied).config.to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8}
    if outer.startswith("Qwen"):
        vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    if outer == "Gemma4Unified":
        inner["model_type"] = "gemma4_unified_text"
    config = getattr(transformers, f"{outer}Config")(text_config=inner, vision_config=vision, tie_word_embeddings=tied)
    torch.manual_seed(0)
    peer = getattr(transformers, f"{outer}ForConditionalGeneration")(config).eval()
    peer.save_pretrained(tmp_path)
    if renamed:
        _rename(tmp_path / "model.safetensors")
    spec = load_spec(tmp_path)
    model = load_model(tmp_path, spec, torch.float32, torch.device("cpu"))
    tokens = torch.randint(3, 90, (50,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = peer(input_ids=tokens[None], token_type_ids=torch.zeros_like(tokens)[None]).logits[0]
    torch.testing.assert_close(logits_of(model, tokens), want, rtol=1e-3, atol=1e-3)


def _rename(file):
    """As modules are called in transformers, and some checkpoints, too."""
    renamed = {}
    for name, tensor in load_file(file).items():
        _, found, within = name.rpartition("language_model.model.")
        kept = name.removeprefix("language_model.")  # the output product
        renamed[f"model.language_model.{within}" if found else kept if kept != name else f"model.{name}"] = tensor
    save_file(renamed, file, {"format": "pt"})
