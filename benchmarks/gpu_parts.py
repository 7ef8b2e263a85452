"""The individual measurements on a GPU; see :mod:`benchmarks.gpu`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_model import Clock, Scale, make_model, setup_of, spec_of
from snapstream.attention.operation import with_backend
from snapstream.cache import EntryType, LayerCache, QuantizedCache, QuantizedType
from snapstream.compression import choose_entries, lay_out, layout_tensors
from snapstream.compression.compress import selected
from snapstream.compression.scoring import observation_votes, pool_votes
from snapstream.config import CacheBudget, LayerPrompt
from snapstream.engine.decode.decode import Decode
from snapstream.engine.decode.graphs import graph_pool
from snapstream.engine.memory.planner import plan_engine
from snapstream.engine.prefill.job import PrefillJob
from snapstream.engine.prefill.prefill import Prefill
from snapstream.engine.runner import ModelRunner
from snapstream.kernels.formats import FORMATS
from snapstream.kernels.operations import Attend, GatedProduct, Product, Rotate
from snapstream.kernels.stock import program_for_rows
from snapstream.kernels.widened import WidenedLayer, widened_numbers
from snapstream.models.decoder import DecoderModel
from snapstream.models.spec import ModelSpec

Row = dict[str, Any]
GUESSES = (1, 3, 7)
ENTRIES = ("bfloat16", "int8", "int8/int4", "int4")
"""Types of cache entries, by their names."""


class Bench:
    """All parts, on one device, with their shared state."""

    def __init__(self, device: torch.device, scale: Scale, weights: str) -> None:
        self.device, self.scale = device, scale
        self.clock = Clock(device, scale.repeats)
        self.weights_format = weights
        self.spec = spec_of(scale.config, weights=weights)
        self._model: DecoderModel | None = None
        self._bandwidth: float | None = None

    @property
    def model(self) -> DecoderModel:
        """The model with all layers."""
        if self._model is None:
            self._model = make_model(self.spec, self.device)
        return self._model

    @property
    def weights(self) -> int:
        """Bytes of weights that a step reads, without the embedding, of which it reads one row per slot."""
        return sum(p.nbytes for name, p in self.model.named_parameters() if not name.startswith("embedding"))

    def available(self) -> int:
        """Bytes that an engine may plan with, weights included."""
        if self.device.type != "cuda":
            return 2**22
        _clean_up()
        held = sum(parameter.nbytes for parameter in self.model.parameters())
        return int(torch.cuda.mem_get_info(self.device)[0] * 0.9) + held

    # -- parts ----------------------------------------------------------------------------------------------------

    def bandwidth(self) -> Iterator[Row]:
        """Memory bandwidth of the device: bytes per second that a copy reads and writes."""
        source = torch.zeros(self.scale.copied, dtype=torch.bfloat16, device=self.device)
        target = torch.empty_like(source)
        seconds = self.clock(lambda: target.copy_(source))
        self._bandwidth = 2 * source.nbytes / seconds["least"]
        yield {"copied": source.nbytes, "seconds": seconds, "bytes_per_second": self._bandwidth}

    def decode(self) -> Iterator[Row]:
        """Decode steps, and their share of bandwidth.

        The share is the time for reading weights and valid entries at the bandwidth of a copy, divided by the step's
        time.
        """
        floor = self._measured_bandwidth()
        C = self.scale.cache
        planned = plan_engine(self._setup(C, self.scale.lengths[-1], 1), self.available())
        most = min(planned.slots_that_fit or 1, self.scale.most_slots)
        for slots in sorted({*(b for b in self.scale.batches if b < most), most}):
            for valid in (C, C // 4):
                seconds = self._step(C, slots, valid)
                read = self.weights + slots * valid * self.spec.kv_bytes_per_token(torch.bfloat16)
                share = read / floor / seconds["median"]
                yield {
                    "slots": slots,
                    "entries": C,
                    "valid": valid,
                    "step_seconds": seconds,
                    "tokens_per_second": slots / seconds["median"],
                    "share_of_bandwidth": share,
                }

    def entries(self) -> Iterator[Row]:
        """A decode step by the type of cache entries."""
        C = self.scale.cache
        for slots in self.scale.batches:
            seconds = {}
            for name in ENTRIES:
                seconds[name] = self._step(C, slots, C, entry_type=_type_named(name))
            yield {"slots": slots, "entries": C, "step_seconds": seconds}

    def table5(self) -> Iterator[Row]:
        """The paper's table 5: the largest batch that fits into the same memory, with full and compressed caches."""
        for length, cache in self.scale.table:
            planned = plan_engine(self._setup(cache, length, 1), self.available())
            row: Row = {"length": length, "cache": cache}
            many = (("full", length, planned.slots_that_fit_full), ("compressed", cache, planned.slots_that_fit))
            for name, entries, fitting in many:
                slots = min(fitting or 1, self.scale.most_slots)
                seconds = self._step(entries, slots, entries)
                row[name] = {"slots": slots, "step_seconds": seconds, "tokens_per_second": slots / seconds["median"]}
            row["ratio"] = row["compressed"]["tokens_per_second"] / row["full"]["tokens_per_second"]
            yield row

    @torch.inference_mode()
    def table4(self) -> Iterator[Row]:
        """The paper's table 4: time of each part of a layer's prefill, for the longest prompt."""
        length, chunk = self.scale.lengths[-1], self.scale.chunk
        prefill, dtype = self._prefill(self.model, length), torch.bfloat16
        budget = CacheBudget.preset("snapstream", self.scale.cache)
        seconds: dict[str, float] = {}

        def add(name: str, work: Callable[[], object]) -> None:
            work()  # warm-up
            calls = (self.clock.once(work, queued=True) for _ in range(self.scale.repeats))
            seconds[name] = seconds.get(name, 0.0) + min(calls)

        (lane,) = prefill.lanes
        for tensor in (lane.hidden, *lane.caches[0].tensors):
            tensor.normal_()
        operations = [*self.model.operations_of(0, cache=0)]
        attending = next(at for at, each in enumerate(operations) if isinstance(each, Attend))
        storing = next(at for at, each in enumerate(operations) if isinstance(each, Rotate))
        operations = with_backend(operations, prefill.backend)
        # Repeated in place, because the contents do not matter.
        parts = {
            "queries, keys and values": operations[:storing],
            "angles": [self.model.rotation_of(0).operation()],
            "rotation and write": operations[storing:attending],
            "attention": operations[attending : attending + 1],
            "output and feed-forward": operations[attending + 1 :],
        }
        for start in range(0, length, chunk):
            work = prefill.chunk_at([start], min(chunk, length - start))
            for name, some in parts.items():
                add(name, program_for_rows(some, work).run)
        layout = lay_out(length, budget)
        default = CacheBudget.of(self.scale.cache)
        rows = max(each.policy.queries for each in (budget, default))
        queries = torch.randn(1, self.spec.heads, rows, self.spec.head_dim, dtype=dtype, device=self.device)
        prompt = LayerPrompt(
            queries=queries[:, :, -budget.policy.queries :],
            keys=lane.caches[0].keys[:, :, :length],
            values=None,
            layout=layout_tensors([layout], self.device),
            sink=budget.sink,
            scale=self.spec.scale,
        )
        votes = observation_votes(prompt.queries, prompt.keys, prompt.layout, sink=budget.sink, scale=self.spec.scale)
        add(
            "votes",
            lambda: pool_votes(
                observation_votes(prompt.queries, prompt.keys, prompt.layout, sink=budget.sink, scale=self.spec.scale),
                pooling="avg",
                kernel=7,
            ),
        )
        counts = (prompt.layout.base, prompt.layout.count, prompt.layout.length)
        add("choice", lambda: selected(votes, *counts, budget.sink, budget.top_k, budget.capacity))
        positions = choose_entries(prompt, budget)[0, :, : layout.count]
        into = self.spec.entry.empty(1, budget.capacity, entry_type=dtype, device=self.device)
        add("copy into the slot", lambda: lane.caches[0].gather(positions, into))
        total = sum(seconds.values())
        # Not in the sum: votes and choice in one call, by the paper's rule and by the default.
        for each in (budget, default):
            shown = replace(
                prompt,
                queries=queries[:, :, -each.policy.queries :],
                layout=layout_tensors([lay_out(length, each)], self.device),
                sink=each.sink,
            )
            name = f"({each.policy.name}: votes and choice)"
            add(name, lambda shown=shown, each=each: choose_entries(shown, each))
        yield {"length": length, "cache": budget.capacity, "chunk": chunk, "layer_seconds": total} | {
            name: {"seconds": each, "share": each / total} for name, each in seconds.items()
        }

    def prefill(self) -> Iterator[Row]:
        """Prefill versus transformers with torch's flash attention, which compresses nothing."""
        from transformers import LlamaConfig, LlamaForCausalLM

        # The last layer does less work here than in transformers. On both sides, the time of one layer is therefore
        # subtracted from the time of several.
        layers = min(5, self.spec.layers)
        settings = {name: value for name, value in self.scale.config.items() if name != "architectures"}
        seconds: dict[tuple[str, int, int], dict[str, float]] = {}
        for many in (layers, 1):
            spec = spec_of(self.scale.config, many)
            with torch.device(self.device):
                config = LlamaConfig(**(settings | {"num_hidden_layers": many}))
                peer = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).eval()
            ours = make_model(spec, self.device)
            for length in self.scale.lengths:
                prefill, caches = self._prefill(ours, length), self._caches(many)
                tokens = torch.arange(length, device=self.device)[None] % 90
                prompt = tokens[0].tolist()
                seconds["ours", many, length] = self.clock(
                    lambda p=prefill, t=prompt, c=caches, s=spec: self._read(p, t, c, s)
                )
                seconds["transformers", many, length] = self.clock(lambda t=tokens, m=peer: _read_by_peer(m, t))
                del prefill
                _clean_up()
            del peer, ours
            _clean_up()
        for length in self.scale.lengths:
            row: Row = {"length": length, "layers": layers - 1}
            for name in ("ours", "transformers"):
                row[name] = seconds[name, layers, length]["median"] - seconds[name, 1, length]["median"]
                row[f"{name}_all"] = [seconds[name, layers, length], seconds[name, 1, length]]
            yield row | {"times_as_fast": row["transformers"] / row["ours"]}

    @torch.inference_mode()
    def widening(self) -> Iterator[Row]:
        """Products of one layer with weights in blocks, as they are stored and widened first, by tokens of a prompt."""
        kind = self.weights_format if self.weights_format in FORMATS else "q4_k"
        model = make_model(spec_of(self.scale.config, 2, kind), self.device)
        products = [each for each in model.operations_of(0) if isinstance(each, Product | GatedProduct)]
        prefill = self._prefill(model, self.scale.widened[-1])
        layer = WidenedLayer(widened_numbers(products), torch.bfloat16, self.device)
        for tokens in self.scale.widened:
            work = prefill.chunk_at([0], tokens)
            stored = self.clock(lambda work=work: program_for_rows(products, work).run())
            widened = self.clock(lambda work=work: program_for_rows(layer.widen(products), work).run())
            row: Row = {"tokens": tokens, "format": kind, "stored": stored, "widened": widened}
            yield row | {"times_as_fast": stored["median"] / widened["median"]}

    def position(self) -> Iterator[Row]:
        """A step of one sequence by position, with a compressed and with a full cache."""
        C = self.scale.cache
        for position in self.scale.lengths:
            compressed, full = self._step(C, 1, C, position), self._step(position, 1, position)
            yield {"position": position, "compressed": compressed, "full": full}

    def speculation(self) -> Iterator[Row]:
        """Verification steps versus plain steps; see docs/speculation.md."""
        C = self.scale.cache
        for slots in self.scale.batches[:3]:
            decode = self._decode(C, slots, C, guesses=max(GUESSES))
            seconds = {"1": self.clock(lambda decode=decode: decode.launch(1, greedy=True))}
            for guesses in GUESSES:
                given = {slot: [1] * guesses for slot in range(slots)}
                step = self.clock(lambda decode=decode, given=given: decode.verify(given, greedy=True))
                seconds[str(guesses + 1)] = step
            yield {"slots": slots, "entries": C, "step_seconds": seconds}

    def memory(self) -> Iterator[Row]:
        """Torch's peak memory versus the plan, while the longest prompt is prefilled and slots decode."""
        length, slots = self.scale.lengths[-1], self.scale.batches[-1]
        self._model = None
        _clean_up()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        setup = self._setup(self.scale.cache, length, slots)
        plan = plan_engine(setup).ours
        before = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        runner = ModelRunner(setup, self.model, plan.lanes)
        runner.warm_up()
        layouts = [lay_out(length - 1, setup.budget)]
        prompt = [index % 90 for index in range(length - 1)]
        self._read(runner.prefiller, prompt, runner.decoder.slot(0, layouts), self.spec)
        self._fill(runner.decoder, setup.budget.capacity, length)
        for greedy in (True, False):
            runner.decoder.launch(self.scale.steps, greedy=greedy)
        parts = {name: getattr(plan, name) for name in ("weights", "slots", "staging", "workspace", "metadata")}
        row: Row = {"length": length, "slots": slots, "plan": plan.total, "plan_parts": parts}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            row["steady"] = torch.cuda.memory_allocated() - before
            row["peak"] = torch.cuda.max_memory_allocated() - before
            row["peak_by_plan"] = row["peak"] / plan.total
        yield row

    # -- shared -----------------------------------------------------------------------------------------------------

    def _measured_bandwidth(self) -> float:
        if self._bandwidth is None:
            next(self.bandwidth())
        assert self._bandwidth is not None
        return self._bandwidth

    def _setup(self, entries: int, length: int, slots: int) -> Any:
        return setup_of(self.spec, self.device, self.scale, entries, length, slots=slots)

    def _step(
        self,
        entries: int,
        slots: int,
        valid: int,
        position: int | None = None,
        entry_type: EntryType = torch.bfloat16,
    ) -> dict[str, float]:
        """Seconds of a step of all slots, whose caches are random and have ``valid`` valid entries."""
        decode = self._decode(entries, slots, valid, position, entry_type=entry_type)
        launch = self.clock(lambda: decode.launch(self.scale.steps, greedy=True))
        return {name: seconds / self.scale.steps for name, seconds in launch.items()}

    def _decode(
        self,
        entries: int,
        slots: int,
        valid: int,
        position: int | None = None,
        guesses: int = 0,
        entry_type: EntryType = torch.bfloat16,
    ) -> Decode:
        """Slots that are ready to decode from the middle of sequences."""
        _clean_up()
        setup = self._setup(entries, entries, slots)
        sizes = {"capacity": entries, "slots": slots, "steps": self.scale.steps, "max_logprobs": 1, "guesses": guesses}
        types = replace(setup.types, cache=entry_type)
        decode = Decode(self.model, setup.backend, types=types, eager=setup.eager, **sizes)
        for layer in decode.layers:
            for tensor in layer.tensors:
                if tensor.dtype == torch.uint8:
                    tensor.random_(0, 60)  # scales, of two or four of these bytes each, are below 0.01
                elif isinstance(layer, QuantizedCache):
                    tensor.fill_(1.0)  # frames
                else:
                    tensor.normal_()
        decode.warm_up(graph_pool(self.device))
        self._fill(decode, valid, valid if position is None else position)
        return decode

    def _fill(self, decode: Decode, valid: int, position: int) -> None:
        """Set the number of valid entries and the position of all slots, and activate them."""
        entries = decode.layers[0].entries
        decode.base.fill_(min(4, entries // 2))
        decode.limit.fill_(entries)
        decode.count.fill_(valid)
        decode.position.fill_(position)
        decode.active.fill_(True)

    def _prefill(self, model: DecoderModel, length: int) -> Prefill:
        setup = self._setup(self.scale.cache, length, 1)
        chunk = self.scale.chunk
        padded = -(-length // chunk) * chunk
        return Prefill(model, setup.backend, types=setup.types, queries=setup.queries, lanes=[padded], chunk=chunk)

    def _caches(self, layers: int) -> list[LayerCache]:
        """Caches that a prompt is compressed into."""
        entry, C = self.spec.entry, self.scale.cache
        return [entry.empty(1, C, entry_type=torch.bfloat16, device=self.device) for _ in range(layers)]

    def _read(self, prefill: Prefill, prompt: list[int], caches: list[LayerCache], spec: ModelSpec) -> None:
        job = PrefillJob(spec, prompt)
        target = job.add(CacheBudget.of(self.scale.cache), caches)
        while not job.finished:
            prefill.advance(job)
        if target.error is not None:
            raise target.error


def _type_named(name: str) -> EntryType:
    return QuantizedType.named(name, torch.bfloat16) or torch.bfloat16


@torch.inference_mode()
def _read_by_peer(peer: Any, tokens: torch.Tensor) -> None:
    peer(tokens, use_cache=True, logits_to_keep=1)


def _clean_up() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
