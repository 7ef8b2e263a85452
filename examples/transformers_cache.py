"""SnapStream in transformers: the same model, prompts and call to generate, with a full cache and fixed-size caches.

    python examples/transformers_cache.py [path/to/model]

Without a path, it runs the small model that comes with the package. The prompts are three texts of up to 4,000 tokens
with hidden notes. The model is asked for one note of each text. In a second turn on the same cache, it is asked for
another.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from snapstream.assets import TASK_MODEL
from snapstream.evaluation.tasks import TASKS, make_sample
from snapstream.integrations.transformers import SnapStreamCache

path = sys.argv[1] if len(sys.argv) > 1 else TASK_MODEL
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="snapstream")

# Three prompts of different lengths. Each is a text with many notes and a question about one of them.
samples = [
    make_sample(TASKS["late-question"], length, seed=7, count=lambda text: len(tokenizer.encode(text)))
    for length in (4000, 3000, 2000)
]
tokenizer.padding_side = "left"
inputs = tokenizer([sample.prompt for sample in samples], return_tensors="pt", padding=True)
settings = {"max_new_tokens": 8, "do_sample": False}

print(f"prompts of {inputs.attention_mask.sum(1).tolist()} tokens, in one batch, padded on the left\n")
for name, cache in (
    ("DynamicCache", DynamicCache(config=model.config)),
    ("SnapStreamCache, 1024 entries", SnapStreamCache(model.config, budget=1024)),
    ("SnapStreamCache, 512 entries", SnapStreamCache(model.config, budget=512)),
):
    output = model.generate(**inputs, past_key_values=cache, **settings)
    answers = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    print(f"{name}: {held / 2**20:.1f} MiB")
    for sample, answer in zip(samples, answers, strict=True):
        print(f"  {sample.prompt.rsplit('.', 1)[-1].strip()!r} -> {answer!r}, right: {sample.reply!r}")

    # A second turn: pass the whole conversation so far. Tokens that the cache has already processed are not prefilled
    # again.
    question = tokenizer([sample.second for sample in samples], return_tensors="pt").input_ids
    conversation = torch.cat((output, question), 1)
    mask = torch.cat((inputs.attention_mask, torch.ones_like(conversation[:, inputs.input_ids.shape[1] :])), 1)
    again = model.generate(conversation, attention_mask=mask, past_key_values=cache, **settings)
    answers = tokenizer.batch_decode(again[:, conversation.shape[1] :], skip_special_tokens=True)
    print(f"  then, asked for another: {[answer.strip() for answer in answers]}")
    print(f"  right:                   {[sample.answer.strip() for sample in samples]}\n")
