"""transformers as the independent reference: its models, with attention restricted to what the oracle keeps.

The full cache stays in transformers' ``DynamicCache``; only which of its positions a decoded token may see comes from
``tests/reference.py``. So the model's code is theirs, and the method's is the slow, obvious one.
"""

import copy

import torch
from transformers import AttentionInterface, DynamicCache

from tests.checkpoints import load_peer
from tests.reference import naive_compress, naive_raw_votes, naive_smooth

_ORACLES = {}


class Oracle:
    """Attention of one sequence under one budget.

    latent: All heads share one cache, as in MLA, and so one choice of positions: votes are averaged over heads.
    """

    def __init__(self, budget, latent):
        self.budget, self.latent = budget, latent
        self.caches = {}

    def attend(self, layer, query, key, value, **extras):
        """query [H, T, D], key [N, L, D], value [N, L, D_v] -> [T, H, D_v]."""
        heads, steps = query.shape[0], query.shape[1]
        group = heads // key.shape[0]
        if steps == key.shape[1]:
            self.caches[layer] = self._compress(query, key, group, **extras)
            return whole_attention(query, key, value, **extras)
        out = []
        for cache in dict.fromkeys(self.caches[layer]):
            cache.append(key.shape[1] - 1)
        for head in range(heads):
            kept = self._seen(self.caches[layer][head // group], key.shape[1] - 1)
            one = {name: extra[head : head + 1] if name == "sinks" else extra for name, extra in extras.items()}
            keys, values = key[head // group, kept][None], value[head // group, kept][None]
            out.append(whole_attention(query[head : head + 1], keys, values, **one)[0, 0])
        return torch.stack(out)[None]

    def _seen(self, cache, position):
        """Positions that the token at `position` sees, which is in the cache already."""
        return cache.tokens()

    def _compress(self, query, key, group, softcap=None, sinks=None):
        """One cache per KV head, or one for all."""
        votes = []
        for n in range(key.shape[0]):
            mine = slice(n * group, (n + 1) * group)
            how = {"cap": softcap or 0.0, "sinks": None if sinks is None else sinks[mine]}
            votes.append(naive_raw_votes(query[mine], key[n], self.budget, **how) if self.budget.top_k else [{}])
        if self.latent:
            kinds = zip(*votes, strict=True)
            votes = [[{p: sum(v[p] for v in kind) / len(kind) for p in kind[0]} for kind in kinds]]
        scores = [naive_smooth(v, self.budget) for v in votes]
        caches = [naive_compress(query, key[n], self.budget, scores=s) for n, s in enumerate(scores)]
        return caches * key.shape[0] if self.latent else caches


class SpeculatingOracle(Oracle):
    """Tokens of one step see the cache as it was with the step's first one, and each other.

    offset: How many tokens of its step are in front of the next one.
    """

    offset = 0

    def _seen(self, cache, position):
        if self.offset == 0:
            cache.before_drafts = cache.tokens()
        return cache.before_drafts + list(range(position - self.offset + 1, position + 1))


def whole_attention(query, key, value, window=None, softcap=None, sinks=None):
    """Attention of the last tokens in float64, all logits at once.

    query [H, T, D], key [N, L, D], value [N, L, D_v] -> [T, H, D_v]. window: tokens seen, the own one included.
    softcap: logits are squeezed into plus and minus this. sinks: one more logit per head [H], which has no value.
    """
    group, steps, length = query.shape[0] // key.shape[0], query.shape[1], key.shape[1]
    logits = query.double() @ key.double().repeat_interleave(group, 0).transpose(1, 2) / query.shape[-1] ** 0.5
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    distance = torch.arange(length - steps, length)[:, None] - torch.arange(length)
    logits = logits.masked_fill((distance < 0) | (distance >= (window or length)), float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[:, None, None].expand(-1, steps, 1)), -1)
    weights = logits.softmax(-1)[..., :length]
    return (weights @ value.double().repeat_interleave(group, 0)).transpose(0, 1).to(query.dtype)


def _attention(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    # The oracle scales by the head size; what a model does beyond that (YaRN) is put into the query.
    query = query * ((scaling or query.shape[-1] ** -0.5) * query.shape[-1] ** 0.5)
    extras = {name: extra for name, extra in (("softcap", softcap), ("sinks", s_aux)) if extra is not None}
    window = kwargs.get("sliding_window")
    if window is not None and window < module.config.max_position_embeddings:
        # transformers' own cache drops what is outside the window
        out = whole_attention(query[0], key[0], value[0], window=window, **extras)
    else:
        out = _ORACLES["now"].attend(module.layer_idx, query[0], key[0], value[0], **extras)
    return out[None], None


AttentionInterface.register("snapstream_oracle", _attention)


def peer_generate(checkpoint, tokens, budget, steps, latent=False):
    """Greedy tokens of transformers' own model, its attention restricted to what the oracle keeps."""
    return oracle_generate(_load(checkpoint), tokens, budget, steps, latent)


@torch.no_grad()
def peer_gaps(checkpoint, tokens, budget, made):
    """How much less likely than the likeliest each token made is, in standard deviations of the logits."""
    model, gaps = _load(checkpoint), []
    _ORACLES["now"] = Oracle(budget, latent=False)
    out = model(torch.tensor([list(tokens)]), use_cache=True)
    for token in made:
        logits = out.logits[0, -1]
        gaps.append(float((logits.max() - logits[token]) / logits.std()))
        out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
    return gaps


def _load(checkpoint, dtype=torch.float32):
    return load_peer(checkpoint, dtype=dtype, attn_implementation="snapstream_oracle")


@torch.no_grad()
def peer_guesses(checkpoint, module, tokens, budget, steps, depth):
    """Greedy tokens in float64, and by number of tokens what a next-token module guesses after them.

    The module is one layer more to the oracle. It guesses on by taking its own state and guess for the model's; what it
    stores then is forgotten.
    """
    model = _load(checkpoint, torch.float64)
    model.config._experts_implementation = "eager"  # others know no float64
    module = module.double()
    _ORACLES["now"] = oracle = Oracle(budget, latent=True)
    past, own_past = DynamicCache(), DynamicCache()

    def read(new):
        hidden = model.model(torch.tensor([new]), past_key_values=past, use_cache=True).last_hidden_state
        return hidden, int(model.lm_head(hidden[0, -1]).argmax())

    def look(hidden, following, cache):
        first = cache.get_seq_length(module.self_attn.layer_idx)
        embedded = model.model.embed_tokens(torch.tensor([following]))
        x = module.eh_proj(torch.cat((module.enorm(embedded), module.hnorm(hidden)), -1))
        positions = torch.arange(first, first + len(following))[None]
        angles = model.model.rotary_emb(x, positions)
        states = module.norm(module(x, position_embeddings=angles, past_key_values=cache, use_cache=True))[:, -1:]
        return states, int(model.lm_head(states[0, -1]).argmax())

    hidden, token = read(list(tokens))
    look(hidden, [*tokens[1:], token], own_past)
    made, guesses = [token], {}
    while len(made) < steps:
        hidden, token = read(made[-1:])
        made.append(token)
        states, guess = look(hidden, [token], own_past)
        guesses[len(made)] = [guess]
        cache, oracle.caches = copy.deepcopy(own_past), copy.deepcopy(kept := oracle.caches)
        while len(guesses[len(made)]) < depth:
            states, guess = look(states, [guess], cache)
            guesses[len(made)].append(guess)
        oracle.caches = kept
    return made, guesses


@torch.no_grad()
def oracle_generate(model, tokens, budget, steps, latent=False):
    """The same with a model in memory, whose attention implementation is `snapstream_oracle`."""
    _ORACLES["now"] = Oracle(budget, latent)
    out = model(torch.tensor([list(tokens)]), use_cache=True)
    made = [int(out.logits[0, -1].argmax())]
    while len(made) < steps:
        out = model(torch.tensor([made[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        made.append(int(out.logits[0, -1].argmax()))
    return made


@torch.no_grad()
def speculate(checkpoint, tokens, budget, latent=False):
    """A generator of lists: greedy tokens of each step. Send how many drafts of the next one are right."""
    model, oracle = _load(checkpoint), SpeculatingOracle(budget, latent)
    _ORACLES["now"] = oracle
    out = model(torch.tensor([list(tokens)]), use_cache=True)
    right = yield [int(out.logits[0, -1].argmax())]
    while True:
        made = [int(out.logits[0, -1].argmax())]
        for oracle.offset in range(right + 1):
            _ORACLES["now"] = oracle
            out = model(torch.tensor([made[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            made.append(int(out.logits[0, -1].argmax()))
        right = yield made[1:]
