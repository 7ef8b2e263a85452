"""The support table of docs/transformers.md: a tiny random model of each architecture, against the oracle.

A row says yes where greedy tokens equal those of DynamicCache with room for everything, and those of the oracle (the
model's own code, attention restricted to what naive code keeps) with little room; otherwise why it is refused.
"""

import copy
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from snapstream import CacheBudget, ConfigurationError
from snapstream.integrations.transformers import SnapStreamCache
from snapstream.integrations.transformers.attention import snapstream_attention
from tests.checkpoints import SMALL, prompt
from tests.peers import oracle_generate

BUDGET = CacheBudget(sink=2, recent=10, top_k=12, window=4, kernel=3)
COMMON = SMALL | {"head_dim": 16, "pad_token_id": 0}
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA4 = WINDOW | {
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
LATENT_NOTE = "one choice of tokens for all heads"
WINDOW_NOTE = "layers with a window keep it"
# Name for people, model type, settings, note.
SUPPORTED = {
    "Llama 2, 3.x": ("llama", {}, ""),
    "Mistral": ("mistral", {"sliding_window": 4096}, "where the window is no shorter than the model's longest text"),
    "Mixtral": ("mixtral", EXPERTS | {"sliding_window": None}, ""),
    "Qwen2, 2.5": ("qwen2", {}, ""),
    "Qwen3": ("qwen3", {}, ""),
    "Qwen3-MoE": ("qwen3_moe", EXPERTS, ""),
    "Gemma": ("gemma", {}, ""),
    "Gemma 2": ("gemma2", WINDOW, f"{WINDOW_NOTE}; capped logits"),
    "Gemma 3 (text)": ("gemma3_text", WINDOW, WINDOW_NOTE),
    "Gemma 4 (31B; 26B-A4B)": ("gemma4_text", GEMMA4, f"{WINDOW_NOTE}; heads of two sizes"),
    "Phi-1.5, 2": ("phi", {}, ""),
    "Phi-3 (4k), Phi-4": ("phi3", {"sliding_window": None}, "without a window in its configuration"),
    "GPT-OSS": ("gpt_oss", EXPERTS | WINDOW, f"{WINDOW_NOTE}; learned sinks"),
    "DeepSeek-V2": ("deepseek_v2", LATENT, LATENT_NOTE),
    "DeepSeek-V3, R1": ("deepseek_v3", LATENT, LATENT_NOTE),
    "OLMo 2": ("olmo2", {}, ""),
    "OLMo 3": ("olmo3", WINDOW, WINDOW_NOTE),
    "Cohere Command R": ("cohere", {}, ""),
    "Cohere Command R7B": ("cohere2", WINDOW, WINDOW_NOTE),
    # With its default of 1.0, most shares of attention are almost 0, and their averages tie.
    "Granite": ("granite", {"attention_multiplier": 0.1}, ""),
    "SmolLM3": ("smollm3", {}, ""),
    "StarCoder2": ("starcoder2", {"sliding_window": None}, "without a window in its configuration"),
    "StableLM": ("stablelm", {}, ""),
    "GLM-4": ("glm4", {}, ""),
    "GLM-4.5": ("glm4_moe", EXPERTS, ""),
    "EXAONE 4": ("exaone4", WINDOW | {"sliding_window_pattern": 2}, WINDOW_NOTE),
    "Ernie 4.5": ("ernie4_5", {}, ""),
    "Seed-OSS": ("seed_oss", {}, ""),
    "GPT-NeoX, Pythia": ("gpt_neox", {}, ""),
    "GPT-2": ("gpt2", {}, ""),
    "OPT": ("opt", {}, ""),
}
ELSEWHERE = "its attention does not go through `AttentionInterface`"
REFUSED = {
    "Bloom": ("bloom", {}, ELSEWHERE, "set_attn_implementation"),
    "MPT": ("mpt", {}, ELSEWHERE, "set_attn_implementation"),
    "GPT-J": ("gptj", {"rotary_dim": 8}, ELSEWHERE, "set_attn_implementation"),
    "Phi-3, 3.5 (128k)": (
        "phi3",
        {"sliding_window": None, "original_max_position_embeddings": 1024},
        "its `generate` drops any cache at 4,096 tokens",
        "drops the cache",
    ),
    "Doge": ("doge", {}, "a learned mask over the cache", "learned mask"),
    "DiffLlama": ("diffllama", {}, "each layer attends to its cache twice", "twice"),
    "Llama 4": (
        "llama4_text",
        {"num_hidden_layers": 4, "num_local_experts": 2},
        "layers with chunked attention",
        "chunked_attention",
    ),
    "Gemma 4 (E2B, E4B)": (
        "gemma4_text",
        GEMMA4 | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": WINDOW["layer_types"] * 2},
        "layers that share caches",
        "num_kv_shared_layers",
    ),
    "Qwen3-Next": (
        "qwen3_next",
        EXPERTS | {"num_hidden_layers": 4},
        "layers with linear attention",
        "linear_attention",
    ),
    "MiniMax": ("minimax", EXPERTS, "layers with linear attention", "linear_attention"),
    "DeepSeek-V3.2": ("deepseek_v32", LATENT, "an index of its own over the cache", "index"),
    "Mistral 7B v0.1": (
        "mistral",
        {"sliding_window": 16},
        "a window in every layer: its cache has a fixed size already",
        "already has a fixed size",
    ),
}


def build(kind, changes):
    torch.manual_seed(0)
    settings = COMMON | changes
    if "kv_lora_rank" in settings:
        settings.pop("head_dim")
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings)).eval()


def rows():
    """The table of docs/transformers.md."""
    yield "| model | supported | |"
    yield "|---|---|---|"
    for name, (_, _, note) in SUPPORTED.items():
        yield f"| {name} | yes | {note} |"
    for name, (_, _, why, _) in REFUSED.items():
        yield f"| {name} | no | {why} |"


def generate(model, tokens, cache, steps):
    out = model.generate(
        torch.tensor([tokens]),
        past_key_values=cache,
        max_new_tokens=steps,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(tokens) :].tolist()


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported(name):
    kind, changes, _ = SUPPORTED[name]
    model = build(kind, changes)
    stock = generate(model, prompt(70), None, 30)
    model.set_attn_implementation("snapstream_oracle")
    expected = {
        length: oracle_generate(model, prompt(length), BUDGET, 40, "kv_lora_rank" in changes) for length in (9, 70)
    }
    model.set_attn_implementation("snapstream")
    assert generate(model, prompt(70), SnapStreamCache(model.config, 128), 30) == stock
    for length, tokens in expected.items():
        assert generate(model, prompt(length), SnapStreamCache(model.config, BUDGET), 40) == tokens


@pytest.mark.parametrize("name", ["Gemma 2", "Gemma 3 (text)", "GPT-OSS", "DeepSeek-V3, R1"])
def test_rows_turns_and_selection_of_other_layers(name):
    """Windows, sinks, capped logits and latents: padded batches, a second turn, and rows that are repeated."""
    kind, changes, _ = SUPPORTED[name]
    model = build(kind, changes)
    stock = build(kind, changes)
    ids = torch.tensor([[0] * 10 + prompt(50, 1), prompt(60, 2)])
    mask = (ids != 0).long()
    settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.set_attn_implementation("snapstream")
    caches = SnapStreamCache(model.config, 128), DynamicCache(config=stock.config)
    for turn in range(2):
        ours, theirs = (
            one.generate(ids, attention_mask=mask, past_key_values=cache, suppress_tokens=[0], **settings)
            for one, cache in zip((model, stock), caches, strict=True)
        )
        assert ours.tolist() == theirs.tolist()
        ids = torch.cat((ours, torch.tensor([prompt(7, turn)] * 2)), 1)
        mask = torch.cat((mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=torch.int64)), 1)
    small = SnapStreamCache(model.config, BUDGET)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=small)
        token, position = torch.tensor([[5], [6]]), mask.sum(1, keepdim=True)
        more = copy.deepcopy(small)
        more.batch_repeat_interleave(2)
        more.batch_select_indices(torch.tensor([3, 0]))
        swapped = model(token[[1, 0]], position_ids=position[[1, 0]], past_key_values=more).logits
        plain = model(token, position_ids=position, past_key_values=small).logits
    torch.testing.assert_close(swapped, plain[[1, 0]])


def test_bidirectional_attention_stays_bidirectional():
    """The attention function is for any model: an encoder with capped logits is not made causal."""
    module = torch.nn.Module()
    module.is_causal = False
    query, key, value = torch.randn(3, 1, 4, 6, 16)
    got, _ = snapstream_attention(module, query, key, value, None, softcap=5.0)
    logits = 5 * torch.tanh(query @ key.transpose(-1, -2) * 16**-0.5 / 5)
    torch.testing.assert_close(got, (logits.softmax(-1) @ value).transpose(1, 2))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_construction(name):
    kind, changes, _, message = REFUSED[name]
    model = build(kind, changes)
    model.set_attn_implementation("snapstream")
    with pytest.raises(ConfigurationError, match=message):
        SnapStreamCache(model.config, BUDGET)


def test_the_table_in_the_documents_is_this_one():
    document = Path(__file__).parents[2] / "docs" / "transformers.md"
    assert "\n".join(rows()) in document.read_text()
