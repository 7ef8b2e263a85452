"""GGUF files of tiny random models, written as llama.cpp's converter writes them."""

import itertools

import numpy
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from snapstream.kernels.formats import FORMATS, Format
from snapstream.models.gguf.weights import stored_name
from tests.blocks import random_rows
from tests.checkpoints import make_model

NAMES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Byte-level tokens of a byte each, then words that merges make.
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]


# What the gguf package reads but does not write.
MADE_UP = {GGMLQuantizationType[name.upper()]: FORMATS[name] for name in ("q4_k", "q5_k", "q6_k")}
MADE_UP[GGMLQuantizationType.IQ4_NL] = Format("iq4_nl", GGMLQuantizationType.IQ4_NL, 32, ((1, 2), (16, 1)))


def byte_tokens():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*bytes_to_unicode().values(), *("".join(merge.split()) for merge in MERGES)]


# What quantised rows need, and a vocabulary for all bytes.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32, "vocab_size": 288}


def stored(tensor, kind):
    """A tensor as it is in a file, and as it comes back."""
    data = tensor.float().numpy()
    if data.ndim == 1:  # llama.cpp never quantises these
        return data, GGMLQuantizationType.F32, tensor.float()
    packed = made_up(tensor, MADE_UP[kind]) if kind in MADE_UP else quantize(data, kind)
    return packed, kind, torch.from_numpy(dequantize(packed, kind))


def made_up(tensor, kind):
    """Random blocks about as large as a tensor, in a format that the gguf package only reads."""
    generator = torch.Generator().manual_seed(len(tensor))
    rows = random_rows(kind, *tensor.shape, generator)
    numbers = torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType(kind.number)))
    middle = float(numbers.mean())
    assert abs(middle) < float(numbers.std())
    at = 0
    for count, width in kind.fields:  # scaled by scaling the factors
        if width == 2:
            for block in range(at, rows.shape[1], kind.nbytes):
                factor = rows[:, block : block + 2].contiguous().view(torch.float16).float()
                rows[:, block : block + 2] = (factor * tensor.std() / numbers.std()).half().view(torch.uint8)
        at += count * width
    return rows.numpy()


def in_pairs(tensor, heads):
    """llama.cpp's order of rows that are rotated: neighbours turn together."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write(path, family, kinds=GGMLQuantizationType.F32, *, change=None, tokens=True, named=(), unmarked=(), **changes):
    """Write a file; returns transformers' model with the very same weights.

    kinds: How matrices are stored: one way, or several, which they take in turn.
    change: Called with the writer before it is closed.
    named: Names of more special tokens; they come before the last two.
    unmarked: The same, but the file says that they are ordinary ones.
    """
    model = make_model(family, **(SIZES | changes))
    config = model.config
    name = NAMES[config.model_type]
    writer = GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if tokens:
        every = byte_tokens()
        last = [*named, *unmarked, "<|end|>", "<|turn|>"]
        every += [f"<unused{n}>" for n in range(config.vocab_size - len(every) - len(last))] + last
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(every)
        writer.add_token_types(
            [3 if token[0] == "<" and len(token) > 1 and token not in unmarked else 1 for token in every]
        )
        writer.add_token_merges(MERGES)
        writer.add_eos_token_id(len(every) - 2)
        writer.add_eot_token_id(len(every) - 1)
        writer.add_chat_template("{% for message in messages %}{{ message['content'] }}<|turn|>{% endfor %}")
    kept, kinds = model.state_dict(), itertools.cycle(kinds if isinstance(kinds, list) else [kinds])
    with torch.no_grad():
        for key, tensor in kept.items():
            if key == "lm_head.weight" and config.tie_word_embeddings:
                continue
            rotated = name == "llama" and (".q_proj." in key or ".k_proj." in key)
            heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
            packed, as_kind, back = stored(in_pairs(tensor, heads) if rotated else tensor, next(kinds))
            writer.add_tensor(stored_name(key), numpy.ascontiguousarray(packed), raw_dtype=as_kind)
            if rotated:  # and back to halves
                back = back.reshape(heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
            tensor.copy_(back)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
