"""One engine of benchmarks/peers.py in a separate process and environment, driven by lines of JSON.

All engines get the same token ids, weights and requests. Decoding is greedy and ignores end tokens, nothing is cached
between prompts, and there are two threads.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from process import serve

TOKENS = 4000
"""Maximum number of decoded tokens per sequence; more than are ever measured."""
CHUNK = 2048
"""Prompt tokens per chunk, for engines that split prompts."""


def resident() -> dict[str, float]:
    """Resident memory of this process in MiB, now and at its peak."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(fields[name].split()[0]) / 1024 for key, name in (("now", "VmRSS"), ("peak", "VmHWM"))}


class Worker:
    """An engine; subclasses implement adding sequences and stepping."""

    def add(self, prompt: list[int], number: int) -> None:
        raise NotImplementedError

    def step(self) -> None:
        """Run one step of the engine."""
        raise NotImplementedError

    def made(self) -> list[int]:
        """Number of tokens decoded so far, per sequence."""
        raise NotImplementedError

    def first_tokens(self, count: int) -> list[int]:
        """The first sequence's first tokens."""
        raise NotImplementedError

    def clear(self) -> bool:
        """Drop all sequences."""
        raise NotImplementedError

    def fill(self, prompts: list[list[int]]) -> float:
        """Prefill prompts until all of them decode; returns the seconds to the last one's first token."""
        start = time.perf_counter()
        for number, prompt in enumerate(prompts):
            self.add(prompt, number)
        while min(self.made()) < 1:
            self.step()
        return time.perf_counter() - start

    def decode(self, tokens: int) -> float:
        """Tokens per second of all sequences together, over ``tokens`` tokens of each."""
        goal = [count + tokens for count in self.made()]
        before, start = sum(self.made()), time.perf_counter()
        while any(count < wanted for count, wanted in zip(self.made(), goal, strict=True)):
            self.step()
        return (sum(self.made()) - before) / (time.perf_counter() - start)

    def paces(self, tokens: int) -> list[float]:
        """Seconds per token of every step, over ``tokens`` tokens of one sequence."""
        paces, goal = [], self.made()[0] + tokens
        while (before := self.made()[0]) < goal:
            start = time.perf_counter()
            self.step()
            paces.append((time.perf_counter() - start) / max(1, self.made()[0] - before))
        return paces

    def say(self, prompt: list[int], count: int) -> list[int]:
        """The first tokens of an answer; all engines should give about the same."""
        self.fill([prompt])
        self.decode(count)
        tokens = self.first_tokens(count)
        self.clear()
        return tokens

    def memory(self) -> dict[str, float]:
        return resident()


class SnapStream(Worker):
    """The built-in engine."""

    def __init__(self, model: str, length: int, batch: int, budget: int | None) -> None:
        from snapstream import LLM

        settings = {"max_model_len": length, "slots": batch, "dtype": "bfloat16"}
        if model.endswith(".gguf"):  # in chunks of 512, as llama.cpp
            path = model
        else:
            path, settings = f"{model}/hf", settings | {"prefill_chunk": CHUNK}
        self.llm = LLM(path, budget=budget, prefix_cache=0, report_plan=lambda _: None, **settings)
        self.names: list[str] = []
        self.outputs: dict[str, Any] = {}

    def add(self, prompt: list[int], number: int) -> None:
        from snapstream import SamplingParams

        self.names.append(self.llm.engine.add_request(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True)))

    def step(self) -> None:
        self.outputs.update((output.request_id, output) for output in self.llm.engine.step())

    def made(self) -> list[int]:
        return [self.outputs[name].token_count if name in self.outputs else 0 for name in self.names]

    def first_tokens(self, count: int) -> list[int]:
        return list(self.outputs[self.names[0]].token_ids[:count])

    def clear(self) -> bool:
        self.llm.engine.reset()
        self.names, self.outputs = [], {}
        return True

    def likelihoods(self, prompt: list[int], count: int) -> list[list[Any]]:
        """The likeliest tokens of a greedy answer: the token taken, then two pairs of token and log-probability."""
        from snapstream import SamplingParams

        (output,) = self.llm.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True, logprobs=2))
        return [[one.token_id, *sorted(one.top.items(), key=lambda pair: -pair[1])[:2]] for one in output.logprobs]


class OpenVino(Worker):
    """OpenVINO GenAI's continuous batching, with or without its cache eviction."""

    def __init__(self, model: str, length: int, batch: int, budget: int | None) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = CHUNK
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 4
        if budget is not None:
            mode = genai.AggregationMode.NORM_SUM
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = genai.CacheEvictionConfig(32, budget // 4, budget, mode)
        # On processors with nothing beyond AVX2, its attention knows only float32.
        number = "bf16" if " avx512f" in Path("/proc/cpuinfo").read_text() else "f32"
        options = {"INFERENCE_PRECISION_HINT": number, "KV_CACHE_PRECISION": number, "INFERENCE_NUM_THREADS": 2}
        self.pipe = genai.ContinuousBatchingPipeline(f"{model}/openvino", scheduler, "CPU", options)
        self.handles: list[Any] = []
        self.tokens: list[list[int]] = []
        self.number = 0

    def add(self, prompt: list[int], number: int) -> None:
        import numpy as np
        import openvino
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = TOKENS, True, False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self.handles.append(self.pipe.add_request(self.number, ids, config))
        self.tokens.append([])
        self.number += 1

    def step(self) -> None:
        self.pipe.step()
        for handle, tokens in zip(self.handles, self.tokens, strict=True):
            while handle.can_read():
                for output in handle.read().values():
                    tokens.extend(output.generated_ids)

    def made(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def first_tokens(self, count: int) -> list[int]:
        return self.tokens[0][:count]

    def clear(self) -> bool:
        for handle in self.handles:
            handle.stop()
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
        self.handles, self.tokens = [], []
        return True


class Transformers(Worker):
    """transformers with SDPA and a full cache, one sequence."""

    def __init__(self, model: str, length: int, batch: int, budget: int | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        assert budget is None
        assert batch == 1
        torch.set_grad_enabled(False)
        self.model = AutoModelForCausalLM.from_pretrained(
            f"{model}/hf", dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self.cache: Any = None
        self.ids: Any = None
        self.tokens: list[int] = []

    def add(self, prompt: list[int], number: int) -> None:
        import torch
        from transformers import DynamicCache

        self.cache, self.ids, self.tokens = DynamicCache(config=self.model.config), torch.tensor([prompt]), []

    def step(self) -> None:
        logits = self.model(self.ids, past_key_values=self.cache, logits_to_keep=1).logits
        self.ids = logits[:, -1:].argmax(-1)
        self.tokens.append(int(self.ids))

    def made(self) -> list[int]:
        return [len(self.tokens)]

    def first_tokens(self, count: int) -> list[int]:
        return self.tokens[:count]

    def clear(self) -> bool:
        self.cache = self.ids = None
        self.tokens = []
        return True


class Vllm(Worker):
    """Stock vLLM on the CPU."""

    def __init__(self, model: str, length: int, batch: int, budget: int | None) -> None:
        from vllm import LLM

        extra = {} if budget is None else {"additional_config": {"snapstream": budget}}
        self.llm = LLM(
            f"{model}/hf",
            skip_tokenizer_init=True,
            disable_log_stats=True,
            enable_prefix_caching=False,
            dtype="bfloat16",
            max_model_len=length,
            max_num_seqs=batch,
            max_num_batched_tokens=CHUNK,
            **extra,
        )
        self.engine = self.llm.llm_engine
        self.names: list[str] = []
        self.outputs: dict[str, Any] = {}
        self.number = 0

    def add(self, prompt: list[int], number: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
        self.names.append(f"r{self.number}")
        self.engine.add_request(self.names[-1], {"prompt_token_ids": prompt}, params)
        self.number += 1

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)

    def made(self) -> list[int]:
        return [len(self.outputs.get(name, ())) for name in self.names]

    def first_tokens(self, count: int) -> list[int]:
        return self.outputs[self.names[0]][:count]

    def clear(self) -> bool:
        self.engine.abort_request(list(self.engine.output_processor.request_states), internal=True)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.names, self.outputs = [], {}
        return True


class LlamaCpp(Worker):
    """llama.cpp, with one sequence at a time, as its Python interface only supports that."""

    flash = True

    def __init__(self, model: str, length: int, batch: int, budget: int | None) -> None:
        import llama_cpp

        assert budget is None
        assert batch == 1
        self.llama = llama_cpp.Llama(
            model if model.endswith(".gguf") else f"{model}/model.gguf",
            n_ctx=length,
            n_batch=CHUNK,
            n_ubatch=512,
            n_threads=2,
            n_threads_batch=2,
            flash_attn=self.flash,
            type_k=llama_cpp.GGML_TYPE_F16,
            type_v=llama_cpp.GGML_TYPE_F16,
            verbose=False,
        )
        self.tokens: list[int] | None = None
        self.prompt: list[int] = []

    def add(self, prompt: list[int], number: int) -> None:
        self.prompt, self.tokens = prompt, []

    def step(self) -> None:
        assert self.tokens is not None
        self.llama.eval(self.tokens[-1:] or self.prompt)
        self.tokens.append(int(self.llama.sample(temp=0.0)))

    def made(self) -> list[int]:
        return [0 if self.tokens is None else len(self.tokens)]

    def first_tokens(self, count: int) -> list[int]:
        assert self.tokens is not None
        return self.tokens[:count]

    def clear(self) -> bool:
        self.llama.reset()
        self.tokens = None
        return True

    def likelihoods(self, prompt: list[int], count: int) -> list[list[Any]]:
        """As :meth:`SnapStream.likelihoods`."""
        import llama_cpp
        import numpy as np

        self.llama.reset()
        found, tokens = [], prompt
        for _ in range(count):
            self.llama.eval(tokens)
            pointer = llama_cpp.llama_get_logits_ith(self.llama.ctx, -1)
            logits = np.ctypeslib.as_array(pointer, (self.llama.n_vocab(),)).astype(np.float64)
            logits -= logits.max() + np.log(np.exp(logits - logits.max()).sum())
            best = np.argsort(-logits)[:2]
            found.append([int(best[0]), *((int(token), float(logits[token])) for token in best)])
            tokens = [int(best[0])]
        self.llama.reset()
        return found


class LlamaCppTogether(Worker):
    """llama.cpp with several sequences in a batch, as its server decodes them, by its C interface."""

    def __init__(self, model: str, length: int, batch: int, budget: int | None) -> None:
        import llama_cpp

        assert budget is None
        self.api = api = llama_cpp
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = length * batch, CHUNK, 512
        options.n_seq_max, options.n_threads, options.n_threads_batch = batch, 2, 2
        options.flash_attn_type = 1  # on: without it, several sequences take twice the memory of a step
        self.context = api.llama_init_from_model(self.model, options)
        self.width = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(CHUNK, 0, 1)
        self.waiting: list[list[int]] = []
        self.tokens: list[list[int]] = []
        self.past: list[int] = []

    def add(self, prompt: list[int], number: int) -> None:
        self.waiting.append(prompt)
        self.tokens.append([])
        self.past.append(0)

    def _run(self, parts: list[tuple[int, int, int, bool]]) -> None:
        """Run tokens: each with its sequence and position, and whether its logits are wanted."""
        self.batch.n_tokens = len(parts)
        for at, (token, sequence, position, wanted) in enumerate(parts):
            self.batch.token[at], self.batch.pos[at] = token, position
            self.batch.n_seq_id[at], self.batch.seq_id[at][0] = 1, sequence
            self.batch.logits[at] = wanted
        assert self.api.llama_decode(self.context, self.batch) == 0

    def _likeliest(self, row: int) -> int:
        import numpy as np

        logits = self.api.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.width,)).argmax())

    def step(self) -> None:
        for sequence, prompt in enumerate(self.waiting):
            if self.past[sequence] == 0:  # one prompt at a time
                for at in range(0, len(prompt), CHUNK):
                    some = prompt[at : at + CHUNK]
                    last = len(prompt) - 1
                    self._run([(token, sequence, at + i, at + i == last) for i, token in enumerate(some)])
                self.past[sequence] = len(prompt)
                self.tokens[sequence].append(self._likeliest(len(some) - 1))
                return
        everyone = range(len(self.waiting))
        self._run([(self.tokens[each][-1], each, self.past[each], True) for each in everyone])
        for each in everyone:
            self.tokens[each].append(self._likeliest(each))
            self.past[each] += 1

    def made(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def first_tokens(self, count: int) -> list[int]:
        return self.tokens[0][:count]

    def clear(self) -> bool:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self.waiting, self.tokens, self.past = [], [], []
        return True


class LlamaCppPlain(LlamaCpp):
    """llama.cpp without flash attention: prefill is slower, but decoding after long prompts is faster."""

    flash = False


ENGINES = {
    "snapstream": SnapStream,
    "openvino": OpenVino,
    "transformers": Transformers,
    "vllm": Vllm,
    "llama.cpp": LlamaCpp,
    "llama.cpp, plain attention": LlamaCppPlain,
    "llama.cpp, together": LlamaCppTogether,
}


def main() -> None:
    engine, model, length, batch, budget = json.loads(sys.argv[1])
    serve(ENGINES[engine](model, length, batch, budget))


if __name__ == "__main__":
    main()
