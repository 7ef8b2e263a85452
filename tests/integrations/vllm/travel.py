"""What proxies do: a prompt is read by one instance, and decoded by another."""

import time

from tests.integrations.vllm.engines import run_by_hand, sampling

LEAVES = {"do_remote_decode": True}


def transfer(directory, role="kv_both", policy="fail", **settings):
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="SnapStreamConnector",
        kv_role=role,
        kv_load_failure_policy=policy,
        kv_connector_extra_config=({} if directory is None else {"directory": str(directory)}) | settings,
    )


def travelling(steps, params, **kwargs):
    made = sampling(steps, **kwargs)
    made.extra_args = (made.extra_args or {}) | {"kv_transfer_params": dict(params)}
    return made


def read(llm, prompts, **kwargs):
    """First tokens, and what a decode instance needs."""
    many = [{"prompt_token_ids": tokens} for tokens in prompts]
    outputs = llm.generate(many, travelling(1, LEAVES, **kwargs), use_tqdm=False)
    return [(list(output.outputs[0].token_ids), output.kv_transfer_params) for output in outputs]


def payloads(directory):
    """Files of caches that have been handed out, once they are there."""
    while any(path.name.startswith(".") for path in directory.iterdir()):
        time.sleep(0.01)
    return list(directory.iterdir())


def decode(llm, prompts, departures, steps, each_step=lambda step: None, **kwargs):
    """Tokens of every prompt, the first one included; ``None`` where the cache did not come."""
    params = [travelling(steps - 1, place, **kwargs) for _, place in departures]
    whole = [tokens + first for tokens, (first, _) in zip(prompts, departures, strict=True)]
    made = run_by_hand(llm, whole, params, each_step)
    return [first + rest if rest else None for (first, _), rest in zip(departures, made, strict=True)]
