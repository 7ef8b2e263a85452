"""The oracle of conversations: what naive code, which shares nothing with the package but the model, makes of turns."""

import copy

import torch

from snapstream.models.weights import load_model, load_spec
from tests.attending import logits_with, sinks_of
from tests.reference import NaiveState, naive_attention, naive_compress, naive_pins, naive_renew


class NaiveConversation:
    """Turn after turn in Python lists of positions, one per layer and KV head; attention in float64.

    overrun: Decoded tokens that a host may have stored past the end of a turn. Special tokens (0 to 2) are never made.
    Layers with a window see the last tokens of all that there have been.
    same_layout: Whether layers have their pinned tokens below the same entry.
    """

    def __init__(self, checkpoint, budget, overrun=0, same_layout=True):
        self.spec = load_spec(checkpoint)
        self.model = load_model(checkpoint, self.spec, torch.float32, torch.device("cpu"))
        self.budget, self.length, self.overrun, self.same_layout = budget, 0, overrun, same_layout
        self.keys, self.values, self.caches, self.past = {}, {}, {}, {}
        self.sinks, self.states = sinks_of(self.model), {}
        self.windows = [self.spec.layer_group(layer).window for layer in range(self.spec.cached_layers)]

    def attend(self, layer, query, n, h, positions):
        keys = torch.stack([self.keys[layer, p][n] for p in positions])
        values = torch.stack([self.values[layer, p][n] for p in positions])
        sinks = self.sinks[layer]
        return naive_attention(
            query[h], keys, values, self.spec.attention_cap, None if sinks is None else sinks[h]
        ).float()

    def recur(self, operation, inputs):
        state = self.states.setdefault(operation.layer, NaiveState(operation))
        return torch.stack([state.take(each) for each in inputs])

    def pinned(self, staged, known, layer):
        """Which of the staged tokens are pinned, as they are numbered here, and where the last of them may be.

        Those of earlier turns are below the ring, unless one is in a ring: then they may be anywhere.
        """
        total = staged[-1] + 1
        every = naive_pins(self.budget, total)
        pins = tuple({i for i, p in enumerate(staged) if p in some} for some in every)
        last = max((min(end, total) for start, end in self.budget.pin if start < total), default=0)
        before = total - (len(staged) - known)  # tokens of earlier turns
        if not last or not known:
            return pins, last
        if last > before:
            return pins, known + last - before
        layers = range(self.spec.cached_layers) if self.same_layout else [layer]
        rings = [cache.ring for (one, _), cache in self.turn_began.items() if one in layers]
        pinned = {p for start, end in self.budget.pin for p in range(max(start, 0), end)} - set(range(self.budget.sink))
        in_ring = any(p in pinned for ring in rings for p in ring)
        return pins, known if in_ring else known - len(rings[0])

    def store(self, layer, key, value, positions):
        for i, position in enumerate(positions if key is not None else ()):
            self.keys[layer, position], self.values[layer, position] = key[i], value[i]

    def turn(self, tokens, steps):
        spec = self.spec
        new = list(range(self.length, self.length + len(tokens)))
        self.turn_began = copy.deepcopy(self.caches)

        def shape(layer):
            # The oracle scales by the head size; some models by another number, which is put into the query.
            entry = spec.entry_of(layer)
            return entry.heads, spec.heads // entry.heads, spec.scale * entry.size**0.5

        def attend_window(layer, query, positions):
            out, group = torch.zeros_like(query), shape(layer)[1]
            for i, position in enumerate(positions):
                seen = list(range(max(0, position + 1 - self.windows[layer]), position + 1))
                for h in range(spec.heads):
                    out[i, h] = self.attend(layer, query[i], h // group, h, seen)
            return out

        def attend_prompt(layer, query, key, value):
            kv_heads, group, adjust = shape(layer)
            query = query * adjust
            self.store(layer, key, value, new)
            if self.windows[layer] is not None:
                return attend_window(layer, query, new)
            out = torch.zeros_like(query)
            for n in range(kv_heads):
                if key is not None:
                    self.past[layer, n] = self.caches[layer, n].tokens() if self.caches.get((layer, n)) else []
                past = self.past[layer, n]
                for i in range(len(new)):
                    for h in range(n * group, (n + 1) * group):
                        out[i, h] = self.attend(layer, query[i], n, h, past + new[: i + 1])
                if key is None:  # the layer whose cache it is has chosen what is kept
                    continue
                staged = past + new
                self.staged = len(staged)
                unknown = torch.zeros(group, len(past), query.shape[-1])
                queries = torch.cat((unknown, query[:, n * group : (n + 1) * group].transpose(0, 1)), 1)
                keys = torch.stack([self.keys[layer, p][n] for p in staged])
                sinks = None if self.sinks[layer] is None else self.sinks[layer][n * group : (n + 1) * group]
                how = {"cap": spec.attention_cap, "sinks": sinks}
                pins, end = self.pinned(staged, len(past), layer)
                cache = naive_compress(queries, keys, self.budget, first_voter=len(past), pins=pins, end=end, **how)
                for part in ("sink", "pinned", "ring"):
                    setattr(cache, part, [staged[i] for i in getattr(cache, part)])
                self.caches[layer, n] = cache
            return out

        def attend_token(layer, query, key, value):
            _, group, adjust = shape(layer)
            query = query * adjust
            self.store(layer, key, value, [self.length])
            if self.windows[layer] is not None:
                return attend_window(layer, query, [self.length])
            out = []
            for h in range(spec.heads):
                if h % group == 0 and key is not None:
                    cache = self.caches[layer, h // group]
                    if self.budget.ring == "resnap":
                        known = {p: self.keys[layer, p][h // group] for p in cache.tokens()}
                        naive_renew(cache, known, self.budget, self.staged, self.staged + self.length - self.began)
                    cache.append(self.length)
                out.append(self.attend(layer, query[0], h // group, h, self.caches[layer, h // group].tokens()))
            return torch.stack(out)[None]

        with torch.no_grad():
            logits = logits_with(self.model, torch.tensor(tokens), torch.tensor(new), attend_prompt, self.recur)
            made = [int(logits[-1:, 3:].argmax()) + 3]
            self.length += len(tokens)
            self.began = self.length
            while len(made) < steps:
                given = torch.tensor(made[-1:]), torch.tensor([self.length])
                logits = logits_with(self.model, *given, attend_token, self.recur)
                self.length += 1
                made.append(int(logits[:, 3:].argmax()) + 3)
        for cache in self.caches.values():  # a launch may have run past the end, over the oldest of a full ring
            if len(cache.ring) + self.overrun > cache.ring_limit:
                cache.ring = cache.ring[len(cache.ring) + self.overrun - cache.ring_limit :]
        return made

    def positions(self):
        last = {
            layer: list(range(max(0, self.length - window), self.length))
            for layer, window in enumerate(self.windows)
            if window is not None
        }
        return [
            []
            if layer in self.states
            else [
                last[layer] if layer in last else self.caches[layer, n].tokens()
                for n in range(self.spec.entry_of(layer).heads)
            ]
            for layer in range(self.spec.cached_layers)
        ]
