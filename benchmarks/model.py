"""The model that the benchmarks share: a Llama of 12 layers, 12 KiB of cache per token in bfloat16."""

CONFIG = {
    "vocab_size": 4096,  # small, so that the output projection does not hide the cost of caches
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65536,
}
