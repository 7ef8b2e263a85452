"""The architectures of the small models: how each is built, and its attention's queries, keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

LAYERS, HIDDEN, HEADS = 2, 192, 6
BACK = 3.0  # Size of the biases that prefer a distance; see `_start_looking_back`.
FAST = 5  # Number of rotations used, the fastest ones.
BALANCE_RATE = 1e-3


class Llama:
    """Grouped heads, dense layers."""

    def build(self, vocabulary: int, max_positions: int, end: int, padding: int) -> PreTrainedModel:
        """Build the untrained model."""
        config = LlamaConfig(
            **common_settings(vocabulary, max_positions, end, padding),
            num_key_value_heads=3,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
        model = LlamaForCausalLM(config)
        self._start_looking_back(model)
        return model

    @torch.no_grad()
    def _start_looking_back(self, model: LlamaForCausalLM) -> None:
        attention = model.model.layers[0].self_attn
        half = attention.head_dim // 2
        key = torch.zeros(half)
        key[:FAST] = BACK
        attention.k_proj.bias.view(-1, 2, half)[:, 0] = key
        queries = attention.q_proj.bias.view(-1, 2, half)
        for head in range(len(queries)):
            queries[head] = torch.stack(turned_back(key, head, model.model.rotary_emb.inv_freq))

    def project(
        self, attention: nn.Module, normed: torch.Tensor, size: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute rotated queries of the last ``size`` tokens, and keys and values of all tokens."""
        heads = (-1, attention.head_dim)
        q = attention.q_proj(normed[:, -size:]).unflatten(-1, heads).transpose(1, 2)
        k = attention.k_proj(normed).unflatten(-1, heads).transpose(1, 2)
        v = attention.v_proj(normed).unflatten(-1, heads).transpose(1, 2)
        q, _ = apply_rotary_pos_emb(q, q, cos[:, -size:], sin[:, -size:])
        k, _ = apply_rotary_pos_emb(k, k, cos, sin)
        return q, k, v

    def after_step(self, layer: nn.Module, hidden: torch.Tensor) -> None:
        """Do nothing: there are no experts to balance."""


class Deepseek:
    """A small DeepSeek-V3: latent attention with low-rank queries, one dense layer, then one with experts."""

    def build(self, vocabulary: int, max_positions: int, end: int, padding: int) -> PreTrainedModel:
        """Build the untrained model."""
        config = DeepseekV3Config(
            **common_settings(vocabulary, max_positions, end, padding),
            moe_intermediate_size=64,
            num_key_value_heads=HEADS,
            q_lora_rank=96,
            kv_lora_rank=112,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=48,
            first_k_dense_replace=1,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            n_shared_experts=1,
            routed_scaling_factor=1.0,
            norm_topk_prob=True,
            topk_method="noaux_tc",  # vLLM reads these two settings, transformers assumes them
            scoring_func="sigmoid",
            num_nextn_predict_layers=0,  # train_next_token.py adds one
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
        config._experts_implementation = "eager"
        model = DeepseekV3ForCausalLM(config)
        with torch.no_grad():
            # Otherwise the first layer's output dominates the token's embedding, and the circuit takes eight times as
            # long to form.
            model.model.embed_tokens.weight.mul_(8)
        self._start_looking_back(model)
        return model

    @torch.no_grad()
    def _start_looking_back(self, model: DeepseekV3ForCausalLM) -> None:
        """Set the biases. Low-rank queries have no bias, so one entry of the low rank is set to a constant instead."""
        attention = model.model.layers[0].self_attn
        half = attention.qk_rope_head_dim // 2
        key = torch.zeros(half)
        key[:FAST] = 1.2 * BACK  # Heads are wider than those of the Llama, so logits are scaled down more.
        attention.kv_a_proj_with_mqa.bias[attention.kv_lora_rank :].view(half, 2)[:, 0] = key
        constant = 10.0
        attention.q_a_proj.bias[0] = constant
        spread = (attention.q_a_proj.weight.square().sum() + constant**2) / attention.q_lora_rank
        queries = attention.q_b_proj.weight.view(HEADS, attention.qk_head_dim, -1)[:, attention.qk_nope_head_dim :, 0]
        for head in range(HEADS):
            pairs = torch.stack(turned_back(key, head, model.model.rotary_emb.inv_freq), -1)
            queries[head] = pairs.flatten() * spread.sqrt() / constant

    def project(
        self, attention: nn.Module, normed: torch.Tensor, size: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute rotated queries of the last ``size`` tokens, and keys and values of all tokens."""
        low = attention.q_a_layernorm(attention.q_a_proj(normed[:, -size:]))
        q = attention.q_b_proj(low).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q, q_rope = q.split((attention.qk_nope_head_dim, attention.qk_rope_head_dim), -1)
        latent, k_rope = attention.kv_a_proj_with_mqa(normed).split(
            (attention.kv_lora_rank, attention.qk_rope_head_dim), -1
        )
        up = attention.kv_b_proj(attention.kv_a_layernorm(latent)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = up.split((attention.qk_nope_head_dim, attention.v_head_dim), -1)
        q_rope, _ = apply_rotary_pos_emb_interleave(q_rope, q_rope[:, :1], cos[:, -size:], sin[:, -size:])
        k_rope, _ = apply_rotary_pos_emb_interleave(k_rope[:, None], k_rope[:, None], cos, sin)
        return torch.cat((q, q_rope), -1), torch.cat((k, k_rope.expand(-1, HEADS, -1, -1)), -1), v

    @torch.no_grad()
    def after_step(self, layer: nn.Module, hidden: torch.Tensor) -> None:
        """Shift the router's biases towards equal loads, as in the training of DeepSeek-V3 (arXiv 2412.19437, 2.1.2).

        Args:
            layer: A layer with experts.
            hidden: Input of the experts, ``[tokens, hidden]``.
        """
        gate = layer.mlp.gate
        chosen = gate(hidden)[2]
        load = functional.one_hot(chosen, gate.num_experts).sum((0, 1)).float()
        gate.e_score_correction_bias += BALANCE_RATE * torch.sign(load.mean() - load)


def common_settings(vocabulary: int, max_positions: int, end: int, padding: int) -> dict[str, Any]:
    """Settings that both configurations share."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": max_positions,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": padding,
    }


def turned_back(key: torch.Tensor, head: int, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A query, as the two components of its pairs, whose score with ``key`` peaks at ``head + 1`` tokens back.

    With RoPE, a score depends on the distance through the angle between query and key. If the biases are constant, with
    a key ``c`` and a query that is ``c`` rotated back by some steps, the score peaks at that distance.
    """
    angle = -(1 + head) * frequencies
    return key * angle.cos(), key * angle.sin()


ARCHITECTURES: dict[str, Llama | Deepseek] = {"llama": Llama(), "deepseek": Deepseek()}
