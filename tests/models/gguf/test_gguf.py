"""Models of one file: the same logits as transformers has with the same numbers, and bad files in one line."""

import random
import struct
from dataclasses import replace

import numpy
import pytest
import torch
import transformers

pytest.importorskip("gguf")
from gguf import ExpertGatingFuncType
from gguf import GGMLQuantizationType as Kind

from snapstream import LLM, CheckpointError, ConfigurationError, SamplingParams, models
from snapstream.engine.settings import load_tokenizer
from snapstream.kernels import cpu
from snapstream.models.fingerprint import fingerprint
from snapstream.models.gguf import configuration
from snapstream.models.gguf.container import open_container
from snapstream.models.storage import formats_in_use
from snapstream.models.weights import load_model, load_spec, with_chosen_formats
from tests.checkpoints import FAMILIES, GROUPED, HYBRIDS, YARN, make_model
from tests.models.gguf.files import NAMES, SIZES, write

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_memory_of_files():
    from snapstream.models.gguf import container

    container._open.cache_clear()


def logits_of(path, tokens, dtype=torch.float32, weights="dense"):
    spec = with_chosen_formats(path, load_spec(path), weights)
    return models.logits_of(load_model(path, spec, dtype, CPU), torch.tensor(tokens))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
@pytest.mark.parametrize("family", GROUPED)
def test_logits_of_transformers(tmp_path, family, kind):
    """With the numbers that come back out of the file."""
    # Llama 3's own frequencies are a test of their own.
    changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}} if family == "llama3-gqa" else {}
    peer = write(tmp_path / "model.gguf", family, kind, **changes)
    rng = random.Random(0)
    tokens = [rng.randrange(250) for _ in range(60)]
    with torch.no_grad():
        want = peer(torch.tensor([tokens])).logits[0]
    got = logits_of(tmp_path / "model.gguf", tokens)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


OTHERS = [
    "phi3",
    "granite",
    "smollm3",
    "olmo2",
    "olmo3",
    "ministral3",
    "glm4",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-moe",
    "gemma4-shared",
    "muse",
    "gpt-oss",
    "mixtral",
    "qwen3-moe",
    "olmoe",
    "glm4-moe",
    *HYBRIDS,
]
# Rows of each projection in blocks of sixteen.
MANY_HEADS = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
PLAIN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
# What llama.cpp takes for granted.
GRANTED = {
    "granite": {"attention_bias": False, "mlp_bias": False},
    "olmo2": {"attention_bias": False},
    "olmoe": {"num_key_value_heads": 8},
    "qwen3-moe": {"mlp_only_layers": []},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "gpt-oss": {
        "intermediate_size": 256,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma4-shared": {
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 288,
        "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "muse": {"num_hidden_layers": 4},
    "ministral3": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
    "olmo3": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": PLAIN_YARN,
        },
    },
    "qwen3-next": MANY_HEADS | {"norm_topk_prob": True, "mlp_only_layers": []},
    "qwen3.5": MANY_HEADS | {"linear_value_head_dim": 32},
    "qwen3.5-moe": MANY_HEADS | {"linear_num_key_heads": 4},
    "gemma3": {"query_pre_attn_scalar": 32},
}


def wide_experts(family):
    """Experts whose rows are whole blocks."""
    names = ("moe_intermediate_size", "shared_expert_intermediate_size")
    return {name: 256 for name in names if name in FAMILIES[family][1]}


@pytest.mark.parametrize("weights", ["dense", "auto"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_K])
@pytest.mark.parametrize("family", OTHERS)
def test_logits_of_other_families(tmp_path, family, kind, weights):
    """As transformers has them with the numbers that come back out of the file, in blocks and widened."""
    experts = wide_experts(family)
    peer = write(tmp_path / "model.gguf", family, kind, **GRANTED.get(family, {}) | experts)
    rng = random.Random(0)
    tokens = [rng.randrange(250) for _ in range(80)]
    with torch.no_grad():
        want = peer(torch.tensor([tokens])).logits[0]
    got = logits_of(tmp_path / "model.gguf", tokens, weights=weights)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_layers_for_multi_token_prediction_are_not_used(tmp_path):
    """llama.cpp counts them as layers."""

    def add(writer):
        writer.add_block_count(3)
        writer.add_nextn_predict_layers(1)
        for name in ("blk.2.attn_norm.weight", "blk.2.nextn.eh_proj.weight"):
            writer.add_tensor(name, numpy.ones(256, dtype=numpy.float32))

    peer = write(tmp_path / "model.gguf", "glm4-moe", Kind.F32, change=add, moe_intermediate_size=256)
    tokens = list(range(40))
    with torch.no_grad():
        want = peer(torch.tensor([tokens])).logits[0]
    got = logits_of(tmp_path / "model.gguf", tokens)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda writer: writer.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX), "expert_gating_func is 1"),
        (lambda writer: writer.add_expert_count(6), "of the wrong shape"),
        (lambda writer: writer.add_expert_used_count(9), "of the 8 experts|num_experts_per_tok"),
    ],
)
def test_experts_that_do_not_fit(tmp_path, change, said):
    write(tmp_path / "model.gguf", "glm4-moe", Kind.F32, change=change, moe_intermediate_size=256)
    with pytest.raises(CheckpointError, match=said):
        load_spec(tmp_path / "model.gguf")


def test_what_would_give_wrong_tokens_is_refused(tmp_path):
    for family, change, said in (
        ("glm4", lambda writer: writer.add_rope_dimension_sections([8, 12, 12, 0]), "rotation by several positions"),
        ("granite", lambda writer: writer.add_rope_scaling_finetuned(False), "a Granite without rotation"),
        ("qwen3", lambda writer: writer.add_sliding_window(64), "sliding-window attention"),
    ):
        path = tmp_path / f"{family}.gguf"
        write(path, family, change=change, **GRANTED.get(family, {}))
        with pytest.raises(CheckpointError, match=said):
            load_spec(path)


def test_numbers_that_are_stated_for_each_layer(tmp_path):
    """As converters write them for hybrids, and for their dense relatives."""
    changes = GRANTED["granite"]
    write(tmp_path / "same.gguf", "granite", change=lambda writer: writer.add_head_count_kv([2, 2]), **changes)
    assert load_spec(tmp_path / "same.gguf").kv_heads == 2
    write(tmp_path / "other.gguf", "granite", change=lambda writer: writer.add_head_count_kv([2, 0]), **changes)
    with pytest.raises(CheckpointError, match=r"head_count_kv is \[2, 0\]"):
        load_spec(tmp_path / "other.gguf")


def test_float16_is_not_for_models_with_large_activations(tmp_path):
    write(tmp_path / "gemma.gguf", "gemma3", Kind.F16)
    write(tmp_path / "qwen.gguf", "qwen3", Kind.F16)
    write(tmp_path / "mixed.gguf", "qwen3", [Kind.F16, Kind.Q8_0])
    dtypes = [load_spec(tmp_path / f"{name}.gguf").dtype for name in ("gemma", "qwen", "mixed")]
    assert dtypes == [torch.bfloat16, torch.float16, torch.bfloat16]


STORED = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
MIXED = [Kind.Q4_K, Kind.Q6_K, Kind.Q8_0, Kind.F16, Kind.Q5_0]


@pytest.mark.skipif(not cpu.available(), reason="no CPU kernels")
@pytest.mark.parametrize("kinds", [*STORED, MIXED, MIXED[::-1]], ids=lambda kinds: getattr(kinds, "name", "mixed"))
@pytest.mark.parametrize("family", GROUPED)
def test_logits_of_transformers_with_weights_as_they_are_stored(tmp_path, family, kinds):
    """In plain torch; kernels round activations to 8 bits, which is about as near as those of bfloat16 are."""
    changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}} if family == "llama3-gqa" else {}
    path = tmp_path / "model.gguf"
    peer = write(path, family, kinds, **changes)
    tokens = [7 * n * n % 250 for n in range(60)]
    with torch.no_grad():
        want = peer(torch.tensor([tokens])).logits[0]
    spec = with_chosen_formats(path, load_spec(path), "auto")
    names = {kind.name.lower() for kind in (kinds if isinstance(kinds, list) else [kinds])}
    assert set(formats_in_use(spec)) == names - {"f16"}
    got = logits_of(path, tokens, weights="auto")
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
    llm = LLM(str(path), max_model_len=512, dtype="float32", slots=1)
    (output,) = llm.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=0))
    got = torch.tensor([one.logprob for one in output.prompt_logprobs[1:]])
    near = want.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert 0 < (got - near).abs().mean() < 0.15 * want.std()


@pytest.mark.skipif(not cpu.available(), reason="no CPU kernels")
def test_types_that_products_do_not_read_are_widened(tmp_path, caplog):
    path = tmp_path / "model.gguf"
    peer = write(path, "qwen2", [Kind.Q8_0, Kind.IQ4_NL])
    llm = LLM(str(path), max_model_len=512, dtype="float32", slots=1)
    assert "stored as IQ4_NL are widened" in caplog.text
    assert llm.engine.plan.weight_formats == "q8_0"
    tokens = [7 * n * n % 250 for n in range(60)]
    with torch.no_grad():
        want = peer(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_of(path, tokens), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
    (output,) = llm.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=0))
    got = torch.tensor([one.logprob for one in output.prompt_logprobs[1:]])
    near = want.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert (got - near).abs().mean() < 0.15 * want.std()


@pytest.mark.skipif(not cpu.available(), reason="no CPU kernels")
def test_weights_that_are_in_blocks_are_not_quantized_again(tmp_path):
    write(tmp_path / "blocks.gguf", "qwen2", MIXED)
    with pytest.raises(
        ConfigurationError, match=r"is quantized already \(q4_k, q5_0, q6_k, q8_0\); give weights='auto'"
    ):
        LLM(str(tmp_path / "blocks.gguf"), max_model_len=512, weights="q8_0")
    write(tmp_path / "numbers.gguf", "llama3-gqa", Kind.F16)
    rows = LLM(str(tmp_path / "numbers.gguf"), max_model_len=512, weights="q4_k").engine.spec.stored_as
    assert [run.format.name for run in rows["blocks.0.attention.qkv.weight"]] == ["q4_k"]


def test_frequencies_of_llama_3(tmp_path):
    """A file has factors where config.json has a rule."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def add_factors(writer):
        plain = 1 / 5e5 ** (torch.arange(0, 32, 2) / 32)
        scaled = ROPE_INIT_FUNCTIONS["llama3"](make_model("llama3-gqa", **SIZES).config, CPU)[0]
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(numpy.float32))

    peer = write(tmp_path / "model.gguf", "llama3-gqa", change=add_factors)
    assert peer.config.rope_parameters["rope_type"] == "llama3"
    tokens = [5 * n % 250 for n in range(200)]
    with torch.no_grad():
        want = peer(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf", tokens), want, rtol=1e-3, atol=1e-3)


def test_the_engine_runs_a_file(tmp_path):
    path = tmp_path / "model.gguf"
    peer = write(path, "qwen2", Kind.Q8_0)
    llm = LLM(str(path), max_model_len=512, dtype="float32", weights="dense", slots=2)
    assert LLM(str(path), max_model_len=512, slots=1).engine.types.weights == torch.bfloat16
    tokens = llm.tokenizer.encode("the 1212 thé")
    want = peer.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    got = llm.generate(tokens, SamplingParams(max_tokens=20, ignore_eos=True))[0]
    assert list(got.token_ids) == want[0, len(tokens) :].tolist()
    assert llm.engine.spec.eos_token_ids == (286, 287)
    assert llm.engine.sampling_defaults == {}


def test_the_tokenizer(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, "qwen2")
    tokenizer = load_tokenizer(str(path))
    text = "the the\n1212 naïve 🙂<|turn|>"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokens[-1] == 287
    words = tokenizer.convert_ids_to_tokens(tokens)
    assert words[:3] == ["t", "he", "Ġthe"]
    assert words[4:8] == ["1", "2", "1", "2"]  # digits stay by themselves, whatever merges say
    assert tokenizer.eos_token == "<|end|>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert chat == "the<|turn|>"


def test_a_file_is_told_from_others(tmp_path):
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        write(tmp_path / f"{name}.gguf", "qwen2", seed=seed)
    a, b, c = (fingerprint(tmp_path / f"{name}.gguf") for name in "abc")
    assert a == c != b


def replaced(data, at, new):
    return data[:at] + new + data[at + len(new) :]


def damages(data):
    """Files that are not what they should be, and what is said of each."""
    huge = struct.pack("<Q", 2**62)
    first = 24  # where metadata begins: the length of its first name
    yield b"", "is empty"
    yield b"GGML" + data[4:], "is not a GGUF file"
    yield replaced(data, 4, struct.pack(">I", 3)), "or another byte order"
    yield data[:20], "in the middle of its header"
    yield data[: len(data) // 3], "which was truncated"
    yield data[:-4096], "which was truncated"
    yield replaced(data, 8, huge), "too short for the"
    yield replaced(data, 16, huge), "too short for the"
    yield replaced(data, first, huge), "in the middle of its header"
    yield replaced(data, first + 8, b"\xff\xfe\xfd"), "not UTF-8"
    at = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens")
    yield replaced(data, at + 8, huge), "too short for the"
    yield replaced(data, at, struct.pack("<I", 77)), "unknown type 77"
    yield replaced(data, at + 4, struct.pack("<I", 9)), "unknown type 9"
    for name, number, said in (
        ("block_count", 2**30, "more layers than tensors"),
        ("block_count", 3, "missing: model"),
        ("feed_forward_length", 2**30, "of the wrong shape"),
        ("attention.head_count", 0, "must be a positive number"),
        ("attention.head_count", 7, None),
    ):
        at = data.index(f"qwen2.{name}".encode()) + len(f"qwen2.{name}") + 4
        yield replaced(data, at, struct.pack("<I", number)), said
    at = data.index(b"token_embd.weight") + len("token_embd.weight")
    yield replaced(data, at, struct.pack("<I", 9)), "9 dimensions"
    yield replaced(data, at + 4, huge), "extends past the end of the file|blocks"
    yield replaced(data, at + 4 + 16, struct.pack("<I", 4096)), "unknown type 4096"
    yield replaced(data, at + 8 + 16, huge), "extends past the end of the file"


def test_damaged_files_are_named_in_one_line(tmp_path):
    """Nothing is made for what a file only says that it has."""
    whole = tmp_path / "whole.gguf"
    write(whole, "qwen2", Kind.Q8_0)
    data, bad = whole.read_bytes(), tmp_path / "bad.gguf"
    cases = list(damages(data))
    assert len(cases) > 15
    for number, (changed, said) in enumerate(cases):
        bad = tmp_path / f"bad{number}.gguf"
        bad.write_bytes(changed)
        with pytest.raises(CheckpointError, match=said) as caught:
            LLM(str(bad), max_model_len=128)
        assert "\n" not in str(caught.value)


def test_random_damage_is_never_more_than_an_error(tmp_path):
    """Bytes of the header, at random: an error of ours, or a model."""
    whole = tmp_path / "whole.gguf"
    write(whole, "qwen2", Kind.Q8_0)
    data = whole.read_bytes()
    end = min(each.offset for each in open_container(whole).tensors.values())
    rng = random.Random(0)
    refused = 0
    for number in range(150):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 4))):
            changed[rng.randrange(end)] = rng.randrange(256)
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(changed)
        try:
            load_model(path, load_spec(path), torch.float32, CPU)
            load_tokenizer(str(path))
        except CheckpointError:
            refused += 1
        path.unlink()
    assert refused > 30


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.add_rope_scaling_type(__import__("gguf").RopeScalingType.LONGROPE), "RoPE scaling 'longrope'"),
        (lambda w: w.add_tensor("blk.7.attn_q.weight", numpy.zeros((2, 32), "f4")), r"unexpected: blk\.7\.attn_q"),
        (lambda w: w.add_sliding_window(64), "sliding-window attention"),
        (lambda w: w.add_rope_dimension_count(16), "rope.dimension_count is 16, but the head size is 32"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, change, said):
    path = tmp_path / "model.gguf"
    write(path, "qwen2", change=change)
    with pytest.raises(CheckpointError, match=said):
        load_model(path, load_spec(path), torch.float32, CPU)


def test_files_called_mistral_have_no_window(tmp_path, monkeypatch):
    """Unless they say so, although transformers' configuration of Mistral has a default."""
    monkeypatch.setitem(NAMES, "mistral", "mistral")
    write(tmp_path / "model.gguf", "mistral", max_position_embeddings=8192)
    assert [group.window for group in load_spec(tmp_path / "model.gguf").groups] == [None]


def test_without_the_package(tmp_path, monkeypatch):
    import builtins

    path = tmp_path / "model.gguf"
    write(path, "qwen2")
    real = builtins.__import__

    def missing(name, *rest):
        if name == "gguf":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigurationError, match=r'pip install "\.\[gguf\]"'):
        load_spec(path)


@pytest.mark.parametrize("family", [*GROUPED, *OTHERS])
def test_configurations_say_what_those_of_transformers_do(tmp_path, monkeypatch, family):
    """Whether a class of transformers makes them, or the file alone."""
    write(tmp_path / "model.gguf", family, Kind.F32, **GRANTED.get(family, {}) | wide_experts(family))
    ours = load_spec(tmp_path / "model.gguf")
    monkeypatch.setattr(configuration, "_is_plain", lambda kind, settings: False)
    theirs = load_spec(tmp_path / "model.gguf")
    assert isinstance(theirs.source, transformers.PreTrainedConfig)
    assert replace(ours, source=None) == replace(theirs, source=None)
