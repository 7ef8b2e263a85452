"""What is particular to DeepSeek: experts, routing, float8 weights, layers for multi-token prediction."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import DeepseekV3Config

from snapstream.errors import CheckpointError
from snapstream.kernels import cpu as kernels
from snapstream.kernels.buffers import BufferView
from snapstream.kernels.operations import PlainProgram
from snapstream.kernels.products import grouped_linear
from snapstream.kernels.stock import StockProgram
from snapstream.kernels.weight import DenseWeight
from snapstream.models import logits_of
from snapstream.models.experts import MixtureOfExperts
from snapstream.models.families import read_spec
from snapstream.models.layers import Result
from snapstream.models.spec import ExpertShape
from snapstream.models.weights import dequantise, load_model, load_spec
from tests.attending import run_on
from tests.checkpoints import LATENT, save_checkpoint
from tests.models.test_weights import edit_config, rewrite
from tests.products import multiply_experts

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
needs_kernels = pytest.mark.skipif(not kernels.library.available(), reason="no kernels, and no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def _build_kernels():
    kernels.available()


def sizes_of(rows, experts, generator):
    return torch.randint(0, experts, (rows,), generator=generator).bincount(minlength=experts)


@pytest.mark.parametrize("how", ["torch", *(pytest.param(each, marks=needs_kernels) for each in ("few", "many"))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "experts", "out"), [(1, 1, 1), (2, 8, 64), (7, 3, 33), (16, 4, 100), (60, 5, 31)])
def test_experts_equal_float64(how, dtype, rows, experts, out):
    generator = torch.Generator().manual_seed(rows)
    sizes = sizes_of(rows, experts, generator)
    x = torch.randn(rows, 96, generator=generator).to(dtype)
    weight = torch.randn(experts, out, 96, generator=generator).to(dtype)
    weight[sizes == 0] = float("nan")  # what nobody chose is not touched
    ends, given = sizes.cumsum(0), DenseWeight(weight)
    got = grouped_linear(x, given, ends) if how == "torch" else multiply_experts(x, given, ends, many=how == "many")
    expert = torch.arange(experts).repeat_interleave(sizes)
    want = torch.stack([weight[e].double() @ row.double() for e, row in zip(expert, x, strict=True)])
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def shape(**changes):
    settings = {
        "count": 6,
        "chosen": 2,
        "inner": 32,
        "shared_inner": 16,
        "dense_layers": frozenset(),
        "groups": 3,
        "chosen_groups": 2,
        "corrected": True,
        "normalize": True,
        "scale": 2.5,
    }
    return ExpertShape(**(settings | changes))


def naive_route(logits, correction, one):
    """Experts and their weights for one token, from the definition, with Python lists."""
    scores = (logits.sigmoid() if one.corrected else logits.softmax(-1)).tolist()
    ranking = [score + (float(correction[i]) if one.corrected else 0.0) for i, score in enumerate(scores)]
    size = one.count // one.groups
    groups = [range(g * size, (g + 1) * size) for g in range(one.groups)]

    def worth(group):
        best = sorted((ranking[e] for e in group), reverse=True)
        return sum(best[:2]) if one.corrected else best[0]

    allowed = [e for group in sorted(groups, key=worth, reverse=True)[: one.chosen_groups] for e in group]
    chosen = sorted(allowed, key=lambda e: -ranking[e])[: one.chosen]
    total = sum(scores[e] for e in chosen) if one.normalize else 1.0
    return {e: scores[e] / total * one.scale for e in chosen}


def dense(matrix):
    return matrix.value.dense(torch.float64)


@pytest.mark.parametrize(
    "one",
    [
        shape(),
        shape(groups=1, chosen_groups=1, chosen=4, shared_inner=0),
        shape(corrected=False, normalize=False),
        shape(corrected=False, normalize=False, groups=1, chosen_groups=1, chosen=6),
    ],
)
@pytest.mark.parametrize("program", [PlainProgram, StockProgram])
def test_experts_equal_naive_experts(one, program):
    torch.manual_seed(0)
    mixture = MixtureOfExperts(32, one)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(std=0.5)
        x = torch.randn(40, 32)
        got = run_on(mixture.operations(BufferView("x", 32), Result(BufferView("y", 32), add=True)), x, program)
        for token, result in zip(x, got, strict=True):
            want = torch.zeros(32, dtype=torch.float64)
            route = naive_route(mixture.router.weight @ token, mixture.router.correction, one)
            for expert, weight in route.items():
                gate, up = (dense(mixture.gate_up)[expert] @ token.double()).chunk(2)
                want += weight * (dense(mixture.down)[expert] @ (F.silu(gate) * up))
            if mixture.shared is not None:
                gate, up = (dense(mixture.shared.gate_up.weight) @ token.double()).chunk(2)
                want += dense(mixture.shared.down.weight) @ (F.silu(gate) * up)
            torch.testing.assert_close(result.double(), want, rtol=1e-4, atol=1e-4)


def quantise(tensors, block):
    """Every projection in float8 with a scale per block, as DeepSeek's own checkpoints are."""
    for name in [name for name in tensors if "_proj" in name and name.endswith("weight")]:
        weight = tensors[name]
        rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
        scales = torch.ones(rows, columns)
        small = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        for i in range(rows):
            for j in range(columns):
                part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
                scales[i, j] = weight[part].abs().max() / 448
                small[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = small, scales


def load(path, dtype=torch.float32):
    return load_model(path, load_spec(path), dtype, CPU)


@pytest.mark.parametrize("block", [(128, 128), (16, 24)])
def test_float8_weights_are_dequantised(tmp_path, block):
    """Against weights that are rounded to float8 and back by hand: the same to the bit."""
    save_checkpoint(tmp_path / "fp8", "deepseek-v3")
    save_checkpoint(tmp_path / "plain", "deepseek-v3")
    settings = {"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3", "activation_scheme": "dynamic"}
    edit_config(tmp_path / "fp8", quantization_config=settings)
    rewrite(tmp_path / "fp8", lambda tensors: quantise(tensors, block))
    small = load_file(tmp_path / "fp8" / "model.safetensors")

    def round_trip(tensors):
        for name, tensor in tensors.items():
            if small[name].dtype == torch.float8_e4m3fn:
                for i in range(tensor.shape[0]):
                    row_scales = small[f"{name}_scale_inv"][i // block[0]]
                    for j in range(0, tensor.shape[1], block[1]):
                        tensor[i, j : j + block[1]] = (
                            small[name][i, j : j + block[1]].float() * row_scales[j // block[1]]
                        )

    rewrite(tmp_path / "plain", round_trip)
    one, other = load(tmp_path / "fp8"), load(tmp_path / "plain")
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    original = load_model(tmp_path / "fp8", load_spec(tmp_path / "fp8"), torch.bfloat16, CPU)
    assert original.blocks[1].feed_forward.gate_up.value.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_per_weight(tmp_path, shape):
    """As Ministral 3 is published, with scales of activations, which are not needed."""
    for name in ("fp8", "plain"):
        save_checkpoint(tmp_path / name, "ministral3")
    settings = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    edit_config(tmp_path / "fp8", quantization_config=settings)

    def round_all(tensors, *, keep):
        for name in [name for name in tensors if "_proj" in name]:
            scale = (tensors[name].abs().max() / 448).to(torch.bfloat16)
            small = (tensors[name] / scale).to(torch.float8_e4m3fn)
            tensors[name] = small if keep else small.float() * scale.float()
            if keep:
                tensors[f"{name}_scale_inv"] = scale.reshape(shape)
                tensors[name.replace(".weight", ".activation_scale")] = torch.ones(shape)

    rewrite(tmp_path / "fp8", lambda tensors: round_all(tensors, keep=True))
    rewrite(tmp_path / "plain", lambda tensors: round_all(tensors, keep=False))
    one, other = load(tmp_path / "fp8"), load(tmp_path / "plain")
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_dequantise_is_a_product_per_block():
    weight = torch.randn(5, 7).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2)
    got = dequantise(weight, scale, (2, 4))
    for i in range(5):
        for j in range(7):
            assert got[i, j] == weight[i, j].float() * scale[i // 2, j // 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.mlp.up_proj.weight_scale_inv"), "missing: .*up_proj.weight_scale_inv"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(3, 1)}),
            r"wrong shape: .*up_proj.weight_scale_inv is \[3, 1\], expected \[1, 1\]",
        ),
        (lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1)}), "unexpected: .*norm.weight_scale_inv"),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path, change, message):
    save_checkpoint(tmp_path, "deepseek-v3")
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    rewrite(tmp_path, lambda tensors: (quantise(tensors, (128, 128)), change(tensors)))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_other_quantisation_is_refused(tmp_path):
    save_checkpoint(tmp_path, "llama3-gqa")
    edit_config(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(CheckpointError, match="quantized with 'awq'"):
        load_spec(tmp_path)


def test_layers_for_multi_token_prediction_are_ignored(tmp_path):
    save_checkpoint(tmp_path, "deepseek-v3")  # the configuration names one such layer
    extra = {
        "model.layers.2.eh_proj.weight": torch.zeros(64, 128),
        "model.layers.2.mlp.gate.weight": torch.zeros(8, 64),
    }
    rewrite(tmp_path, lambda tensors: tensors.update(extra))
    load(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}))
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.3\.eh_proj"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek-v3", {"n_group": 3}, "cannot be divided into 3 groups"),
        ("deepseek-v3", {"num_experts_per_tok": 5}, "hold fewer experts"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
    ],
)
def test_other_routing_is_refused(tmp_path, family, changes, message):
    save_checkpoint(tmp_path, family)
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_spec(tmp_path)


def test_the_correction_stays_float32(tmp_path):
    save_checkpoint(tmp_path, "deepseek-v3")
    model = load(tmp_path, torch.bfloat16)
    names = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert names == {"blocks.1.feed_forward.router.correction"}


def test_bfloat16_agrees(tmp_path):
    peer = save_checkpoint(tmp_path, "deepseek-v3", initializer_range=0.1, dtype=torch.bfloat16)
    spec = load_spec(tmp_path)
    model = load_model(tmp_path, spec, torch.bfloat16, CPU)
    tokens = torch.arange(5, 60)
    with torch.no_grad():
        got = logits_of(model, tokens)
        rounded = peer(tokens[None]).logits[0].float()
        exact = peer.float()(tokens[None]).logits[0]
    # On some processors, rounding sends a token to another expert in transformers, which in float32 it does not.
    nearest = torch.stack([F.cosine_similarity(got, want, dim=-1) for want in (rounded, exact)]).amax(0)
    assert nearest.min() > 0.98


@pytest.mark.parametrize("family", LATENT)
def test_a_token_takes_one_latent(tmp_path, family):
    save_checkpoint(tmp_path, family)
    spec = load_spec(tmp_path)
    settings = LATENT[family][1]
    latent = settings["kv_lora_rank"] + settings["qk_rope_head_dim"]
    assert spec.kv_bytes_per_token(torch.float32) == 2 * latent * 4
    assert (spec.kv_heads, spec.head_dim) == (1, latent)


def test_scale_of_deepseek_r1():
    """The published configuration: YaRN with factor 40 and mscale_all_dim 1."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    }
    spec = read_spec(DeepseekV3Config(rope_parameters=rope, max_position_embeddings=163840))
    assert spec.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
