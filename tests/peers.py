"""transformers as the independent reference: its models, with attention restricted to what the oracle keeps.

The full cache stays in transformers' ``DynamicCache``; only which of its positions a decoded token may see comes from
``tests/reference.py``. So the model's code is theirs, and the method's is the slow, obvious one.
"""

from dataclasses import replace

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from tests.reference import naive_attention, naive_compress, naive_pool, naive_votes

_ORACLES = {}


class Oracle:
    """Attention of one sequence under one budget.

    latent: All heads share one cache, as in MLA, and so one choice of positions: votes are averaged over heads.
    """

    def __init__(self, budget, latent):
        self.budget, self.latent = budget, latent
        self.caches = {}

    def attend(self, layer, query, key, value):
        """query [H, T, D], key [N, L, D], value [N, L, D_v] -> [T, H, D_v]."""
        heads, steps = query.shape[0], query.shape[1]
        group = heads // key.shape[0]
        if steps == key.shape[1]:
            self.caches[layer] = self._compress(query, key, group)
            scores = query.double() @ key.double().repeat_interleave(group, 0).transpose(1, 2)
            scores = scores / query.shape[-1] ** 0.5
            scores.masked_fill_(torch.ones(steps, steps, dtype=torch.bool).triu(1), float("-inf"))
            out = scores.softmax(-1) @ value.double().repeat_interleave(group, 0)
            return out.transpose(0, 1).to(query.dtype)
        out = []
        for cache in dict.fromkeys(self.caches[layer]):
            cache.append(key.shape[1] - 1)
        for head in range(heads):
            kept = self.caches[layer][head // group].tokens()
            out.append(naive_attention(query[head, 0], key[head // group, kept], value[head // group, kept]))
        return torch.stack(out)[None].to(query.dtype)

    def _compress(self, query, key, group):
        """One cache per KV head, or one for all."""
        raw = replace(self.budget, kernel=1)
        votes = [
            naive_votes(query[n * group : (n + 1) * group], key[n], raw) if self.budget.top_k else {}
            for n in range(key.shape[0])
        ]
        if self.latent:
            votes = [{p: sum(v[p] for v in votes) / len(votes) for p in votes[0]}]
        scores = [naive_pool(v, self.budget) for v in votes]
        caches = [naive_compress(query, key[n], self.budget, scores=s) for n, s in enumerate(scores)]
        return caches * key.shape[0] if self.latent else caches


def _attention(module, query, key, value, attention_mask, scaling=None, **_):
    # The oracle scales by the head size; what a model does beyond that (YaRN) is put into the query.
    query = query * ((scaling or query.shape[-1] ** -0.5) * query.shape[-1] ** 0.5)
    out = _ORACLES["now"].attend(module.layer_idx, query[0], key[0], value[0])
    return out[None], None


AttentionInterface.register("snapstream_oracle", _attention)


@torch.no_grad()
def peer_generate(checkpoint, tokens, budget, steps, latent=False):
    """Greedy tokens of transformers' own model, its attention restricted to what the oracle keeps."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="snapstream_oracle"
    )
    _ORACLES["now"] = Oracle(budget, latent)
    out = model(torch.tensor([list(tokens)]), use_cache=True)
    made = [int(out.logits[0, -1].argmax())]
    while len(made) < steps:
        out = model(torch.tensor([made[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        made.append(int(out.logits[0, -1].argmax()))
    return made
