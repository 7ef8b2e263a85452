"""The real model in a package, if it is installed (`make test-smollm2`): its tokenizer, its logits, its answers."""

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from snapstream import LLM, CheckpointError, SamplingParams
from snapstream.assets import PACKAGED

try:
    FILE = PACKAGED["smollm2"].find()
except CheckpointError as error:
    pytest.skip(str(error), allow_module_level=True)
LLAMA_CPP = json.loads((Path(__file__).parent / "smollm2.json").read_text())
"""What llama.cpp's tokenizer makes of a page of text, and of a conversation."""
NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2", max_model_len=2048, slots=2, sessions=1, report_plan=lambda plan: None)


def test_tokens_of_llama_cpp(llm):
    for text, tokens in (("text", "tokens"), ("chat", "chat_tokens")):
        ours = llm.tokenizer.encode(LLAMA_CPP[text], add_special_tokens=False)
        assert ours == LLAMA_CPP[tokens]
        assert llm.tokenizer.decode(ours) == LLAMA_CPP[text]
    assert len(LLAMA_CPP["tokens"]) > 300
    assert llm.chat_text([{"role": "user", "content": "What is the capital of France?"}]) == LLAMA_CPP["chat"]


def peer():
    """Transformers' model with the file's weights, as the gguf package reads them."""
    reader = GGUFReader(FILE)

    def says(name):
        return reader.get_field(f"llama.{name}").contents()

    config = LlamaConfig(
        vocab_size=says("vocab_size"),
        hidden_size=says("embedding_length"),
        intermediate_size=says("feed_forward_length"),
        num_hidden_layers=says("block_count"),
        num_attention_heads=says("attention.head_count"),
        num_key_value_heads=says("attention.head_count_kv"),
        rms_norm_eps=says("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=says("context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": says("rope.freq_base")},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    stored = {one.name: dequantize(one.data, one.tensor_type) for one in reader.tensors}
    names = NAMES | {
        f"model.layers.{layer}.{ours}.weight": f"blk.{layer}.{theirs}.weight"
        for layer in range(config.num_hidden_layers)
        for ours, theirs in LAYER_NAMES.items()
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = torch.from_numpy(stored.pop(names[name]).copy())
            if ".q_proj." in name or ".k_proj." in name:  # llama.cpp turns neighbours, transformers halves
                weight = weight.reshape(-1, 32, 2, config.hidden_size).swapaxes(1, 2)
            parameter.copy_(weight.reshape(parameter.shape))
    assert not stored
    return model


def test_logits_of_transformers_with_the_same_weights():
    tokens = torch.tensor(LLAMA_CPP["tokens"])
    with torch.no_grad():
        logits = peer()(tokens[None]).logits[0]
    want = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    # Kernels that read blocks round the rows that they multiply to 8 bits.
    for weights, off in (("dense", 1e-3), ("auto", 0.3)):
        settings = {"dtype": "float32", "max_model_len": 512, "slots": 1, "weights": weights}
        llm = LLM("smollm2", report_plan=lambda plan: None, **settings)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        made = llm.generate(tokens.tolist(), params)[0].prompt_logprobs
        torch.testing.assert_close(torch.tensor([one.logprob for one in made[1:]]), want, atol=off, rtol=0)


def test_it_answers(llm):
    def ask(text, **more):
        return llm.chat([{"role": "user", "content": text}], SamplingParams(max_tokens=24), **more).text

    assert "Paris" in ask("Complete the sentence: The Eiffel Tower is in the city of")
    text = "The phone number of Maria is 5831. The umbrella was left in the cellar. Alice slept."
    assert "5831" in ask(f"{text}\n\nWhat is the phone number of Maria?")
    context = llm.read(text)
    questions = ["What is the phone number of Maria?", "Where was the umbrella left?"]
    answers = [output.text for output in llm.generate(questions, SamplingParams(max_tokens=24), context=context)]
    assert "5831" in answers[0]
    assert "cellar" in answers[1]
