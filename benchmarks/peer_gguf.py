"""Writes the benchmarks' model as GGUF, for llama.cpp; needs the `gguf` package.

python benchmarks/peer_gguf.py WEIGHTS.npz MODEL.gguf
"""

from __future__ import annotations

import sys
from typing import Any

import gguf
import numpy as np

from model import CONFIG

HEADS, KV_HEADS, LAYERS = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["num_hidden_layers"]
HEAD_DIM = CONFIG["hidden_size"] // HEADS


def interleaved(weight: Any, heads: int) -> Any:
    """Rows of a projection in llama.cpp's order for RoPE: pairs are adjacent rather than half a head apart."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def main() -> None:
    weights = np.load(sys.argv[1])
    writer = gguf.GGUFWriter(sys.argv[2], "llama")
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(CONFIG["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")

    def add(name: str, value: Any) -> None:
        if value.ndim == 1:
            writer.add_tensor(name, value)
            return
        # The values are float32 copies of bfloat16 numbers, so their upper halves are exact.
        upper = (np.ascontiguousarray(value).view(np.uint32) >> 16).astype(np.uint16)
        writer.add_tensor(name, upper.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    add("output.weight", weights["lm_head.weight"])
    for layer in range(LAYERS):
        theirs, ours = f"model.layers.{layer}.", f"blk.{layer}."
        for name, source in (
            ("attn_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ):
            add(f"{ours}{name}.weight", weights[f"{theirs}{source}.weight"])
        add(f"{ours}attn_q.weight", interleaved(weights[f"{theirs}self_attn.q_proj.weight"], HEADS))
        add(f"{ours}attn_k.weight", interleaved(weights[f"{theirs}self_attn.k_proj.weight"], KV_HEADS))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
