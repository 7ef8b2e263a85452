"""Both generations of vLLM's runner, imitated: what they are told by the scheduler reaches the sequences.

The first generation also runs for real in test_engine.py. The second needs a GPU; here at least its calls are made in
the order in which it makes them.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from snapstream.config import CacheBudget
from snapstream.integrations.vllm.runner import _reporting_v1, _reporting_v2
from snapstream.integrations.vllm.step import Sequences

BUDGET = CacheBudget(sink=4, recent=20, top_k=8, window=8)


def output(new=(), cached=(), resumed=(), finished=(), preempted=(), scheduled=()):
    """A scheduler's output: new (id, prompt, known, kv_budget), cached (id, generated), scheduled (id, computed, n)."""
    requests = [
        SimpleNamespace(
            req_id=name,
            prompt_token_ids=[5] * prompt,
            prompt_embeds=None,
            prompt_len=prompt,
            prefill_token_ids=[5] * known,
            sampling_params=SimpleNamespace(extra_args={"kv_budget": entries} if entries else None),
        )
        for name, prompt, known, entries in new
    ]
    return SimpleNamespace(
        scheduled_new_reqs=requests,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _ in cached],
            num_output_tokens=[generated for _, generated in cached],
            resumed_req_ids=set(resumed),
        ),
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted) or None,
        scheduled=list(scheduled),
    )


class First:
    """The order of calls in vllm.v1.worker.gpu_model_runner.GPUModelRunner.execute_model."""

    def execute_model(self, scheduler_output, fail=False):
        self._update_states(scheduler_output)
        names, computed, scheduled = zip(*scheduler_output.scheduled, strict=True)
        self.input_batch = SimpleNamespace(
            req_ids=list(names),
            num_reqs=len(names),
            num_computed_tokens_cpu=np.array([*computed, 999], np.int32),  # longer than the batch, as in vLLM
        )
        self._prepare_inputs(scheduler_output, np.array(scheduled, np.int32))
        if fail:
            raise RuntimeError("out of memory")
        return self.snapstream.step

    def _update_states(self, scheduler_output):
        pass

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
        return "inputs"


class Second:
    """The order of calls in vllm.v1.worker.gpu.model_runner.GPUModelRunner.execute_model."""

    def execute_model(self, scheduler_output, fail=False):
        self.finish_requests(scheduler_output)
        self.add_requests(scheduler_output)
        self.prepare_inputs(scheduler_output, "state")
        if fail:
            raise RuntimeError("out of memory")
        return self.snapstream.step

    def finish_requests(self, scheduler_output):
        pass

    def add_requests(self, scheduler_output):
        pass

    def prepare_inputs(self, scheduler_output, state):
        names, computed, scheduled = zip(*scheduler_output.scheduled, strict=True)
        return SimpleNamespace(
            req_ids=list(names),
            num_computed_tokens_np=np.array(computed, np.int32),
            num_scheduled_tokens=np.array(scheduled, np.int32),
        )


def runner(generation):
    made = (_reporting_v1(First) if generation == 1 else _reporting_v2(Second))()
    made.snapstream = Sequences(BUDGET, 16, shares=False)
    return made


@pytest.mark.parametrize("generation", [1, 2])
def test_steps_are_reported_and_end(generation):
    made = runner(generation)
    new = [("a", 50, 50, None), ("b", 10, 10, None), ("c", 60, 60, 16)]
    step = made.execute_model(output(new=new, scheduled=[("a", 0, 50), ("b", 0, 10), ("c", 0, 59)]))
    assert [(window.request_id, window.last) for window in step.windows] == [("a", True), ("c", False)]
    assert made.snapstream.step is None
    cached = [("a", 1), ("b", 1), ("c", 0)]
    step = made.execute_model(output(cached=cached, scheduled=[("a", 50, 1), ("b", 10, 1), ("c", 59, 1)]))
    assert step.rows.tolist() == [0, 1]
    assert step.placed.used.tolist() == [32, 11]
    assert [(window.request_id, window.last) for window in step.windows] == [("c", True)]
    step = made.execute_model(output(cached=[("c", 1)], finished=["a", "b"], scheduled=[("c", 60, 1)]))
    assert step.placed.used.tolist() == [16]  # its own budget


@pytest.mark.parametrize("generation", [1, 2])
def test_a_preempted_request_is_planned_anew(generation):
    made = runner(generation)
    made.execute_model(output(new=[("a", 50, 50, None)], scheduled=[("a", 0, 50)]))
    made.execute_model(output(cached=[("a", 1)], scheduled=[("a", 50, 1)]))
    made.execute_model(output(new=[("b", 5, 5, None)], preempted=["a"], scheduled=[("b", 0, 5)]))
    back = (
        output(cached=[("a", 2)], resumed=["a"], scheduled=[("a", 16, 36)])
        if generation == 1
        else output(new=[("a", 50, 52, None)], scheduled=[("a", 16, 36)])  # V2 sends it as a new request
    )
    (window,) = made.execute_model(back).windows
    assert window.last
    assert window.layout.prompt.length == 52


@pytest.mark.parametrize("generation", [1, 2])
def test_a_failed_step_ends_too(generation):
    made = runner(generation)
    with pytest.raises(RuntimeError, match="out of memory"):
        made.execute_model(output(new=[("a", 50, 50, None)], scheduled=[("a", 0, 50)]), fail=True)
    assert made.snapstream.step is None
