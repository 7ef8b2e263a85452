"""Engines of vLLM for the tests, and what one may ask them."""

import contextlib
import sys
from unittest import mock

from snapstream.config import CacheBudget

# Oracles see keys of heads, not latents, so latent attention is compared under the policy that needs queries alone.
BUDGET = CacheBudget(sink=4, recent=64, top_k=60, window=32, policy="snapstream")
MIXED = CacheBudget(sink=4, recent=32, top_k=92, window=16)
# Stock vLLM computes MLA on a CPU as transformers does only without its own rotary kernel. Where there is AMX, it would
# take a backend that knows no float32.
MLA = {
    "block_size": 16,
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    "attention_backend": "CPU_MLA",
}


@contextlib.contextmanager
def vllm_engine(checkpoint, budget=None, **settings):
    """An engine in this process; ``budget`` switches the plugin on."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "enforce_eager": True,
        "block_size": 32,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
    } | settings
    if budget is not None:
        asked = budget.as_dict() if isinstance(budget, CacheBudget) else budget
        settings["additional_config"] = {"snapstream": asked}
    # vLLM looks through all modules for its kernels, with each engine once more, and stumbles over numba, which n-gram
    # speculation imports.
    stumbles = "numba" in sys.modules and "vllm.triton_utils.dispatcher" in sys.modules
    with mock.patch("vllm.triton_utils.dispatcher._rebind_kernels") if stumbles else contextlib.nullcontext():
        try:
            llm = LLM(model=str(checkpoint), **settings)
        except Exception:  # groups of processes are made already, and the next engine may need others
            cleanup_dist_env_and_memory()
            raise
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def sampling(steps, kv_budget=None, pin=None, **kwargs):
    from vllm import SamplingParams

    given = {"kv_budget": kv_budget, "pin": pin}
    given = {name: value for name, value in given.items() if value is not None}
    extra = {"extra_args": given} if given else {}
    return SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True, detokenize=False, **extra, **kwargs)


def generate(llm, prompts, steps, **kwargs):
    """Greedy tokens of every prompt."""
    prompts = [{"prompt_token_ids": tokens} for tokens in prompts]
    outputs = llm.generate(prompts, sampling(steps, **kwargs), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def scheduler(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def counted(llm, name):
    """One of vLLM's counters, over all engines."""
    return sum(each.value for each in llm.get_metrics() if each.name == f"vllm:{name}")


def free_blocks(llm):
    return scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks()


def held_blocks(llm):
    """Blocks that each running request holds now, nulls left out."""
    manager = scheduler(llm).kv_cache_manager.coordinator.single_type_managers[0]
    return {
        request.request_id: sum(not block.is_null for block in manager.req_to_blocks[request.request_id])
        for request in sorted(scheduler(llm).running, key=lambda request: request.request_id)
    }


def run_by_hand(llm, prompts, params, each_step=lambda step: None):
    """Drive the engine step by step; returns tokens by request id."""
    engine = llm.llm_engine
    params = params if isinstance(params, list) else [params] * len(prompts)
    for number, (tokens, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"r{number}", {"prompt_token_ids": tokens}, param)
    made, step = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            made[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
        each_step(step)
        step += 1
    return [made.get(f"r{number}") for number in range(len(prompts))]
