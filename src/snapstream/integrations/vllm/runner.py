"""vLLM's model runners, extended to report each step to :class:`~snapstream.integrations.vllm.step.Sequences`.

There are two: the first generation (CPU, and optionally GPU) and model runner V2 (the default on GPU). Only the
requests of a step and the tokens of each are taken from them. V2 has been checked by reading its source, not by running
it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.compatibility import RUNNER_V1_HOOKS, RUNNER_V2_HOOKS, missing_hook
from snapstream.integrations.vllm.step import Sequences


def _ending(base: Any) -> type:
    """A subclass of a runner whose steps always end with the forward pass, even after an error."""

    class EndingRunner(base):
        snapstream: Sequences

        def execute_model(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().execute_model(*args, **kwargs)
            finally:
                self.snapstream.end()

    return EndingRunner


def _reporting_v1(base: Any) -> type:
    """A subclass of ``vllm.v1.worker.gpu_model_runner.GPUModelRunner`` that reports its steps."""

    class ReportingRunner(_ending(base)):  # type: ignore[misc]
        def _update_states(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            sequences = self.snapstream
            sequences.forget(scheduler_output.finished_req_ids)
            sequences.pause(scheduler_output.preempted_req_ids or ())
            for new in scheduler_output.scheduled_new_reqs:
                tokens = new.prompt_token_ids if new.prompt_token_ids is not None else new.prompt_embeds
                sequences.admit(new.req_id, len(tokens), len(tokens), new.sampling_params.extra_args)
            cached = scheduler_output.scheduled_cached_reqs
            for request_id, generated in zip(cached.req_ids, cached.num_output_tokens, strict=True):
                if request_id in cached.resumed_req_ids:
                    sequences.resume(request_id, generated)
            return super()._update_states(scheduler_output, *args, **kwargs)

        def _prepare_inputs(self, scheduler_output: Any, scheduled: np.ndarray, *args: Any, **kwargs: Any) -> Any:
            inputs = super()._prepare_inputs(scheduler_output, scheduled, *args, **kwargs)
            batch = self.input_batch
            self.snapstream.begin(batch.req_ids, batch.num_computed_tokens_cpu[: batch.num_reqs], scheduled)
            return inputs

    return ReportingRunner


def _reporting_v2(base: Any) -> type:
    """A subclass of ``vllm.v1.worker.gpu.model_runner.GPUModelRunner`` that reports its steps."""

    class ReportingRunner(_ending(base)):  # type: ignore[misc]
        def finish_requests(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.snapstream.forget(scheduler_output.finished_req_ids)
            self.snapstream.forget(scheduler_output.preempted_req_ids or ())  # they come back as new requests
            return super().finish_requests(scheduler_output, *args, **kwargs)

        def add_requests(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            for new in scheduler_output.scheduled_new_reqs:
                known = len(new.prefill_token_ids)
                self.snapstream.admit(new.req_id, new.prompt_len, known, new.sampling_params.extra_args)
            return super().add_requests(scheduler_output, *args, **kwargs)

        def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            batch = super().prepare_inputs(scheduler_output, *args, **kwargs)
            self.snapstream.begin(batch.req_ids, batch.num_computed_tokens_np, batch.num_scheduled_tokens)
            return batch

    return ReportingRunner


def adopt_runner(runner: Any, sequences: Sequences, *, is_v2: bool) -> None:
    """Make a model runner report its steps.

    Raises:
        ConfigurationError: The runner lacks a function that is needed.
    """
    if obstacle := missing_hook(RUNNER_V2_HOOKS if is_v2 else RUNNER_V1_HOOKS):
        raise ConfigurationError(f"SnapStream cannot work here: {obstacle}")
    runner.__class__ = (_reporting_v2 if is_v2 else _reporting_v1)(type(runner))
    runner.snapstream = sequences
