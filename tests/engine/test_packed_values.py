"""Values packed once per layer, in bfloat16: whatever came before, attention sees what is in the staging cache."""

import os
import signal

import pytest
import torch

from snapstream import RequestError, SamplingParams
from snapstream.engine.prefill.prefill import Prefill
from snapstream.kernels import cpu as kernels
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_conversation import NO_SPECIAL, run
from tests.engine.test_engine import BUDGET, greedy, make

needs_packing = pytest.mark.skipif(
    not (
        kernels.library.available()
        and kernels.available()
        and kernels.prefill_instructions(torch.bfloat16) != "portable"
    ),
    reason="values are packed for products of bfloat16 only",
)


@pytest.fixture(scope="module", params=["qwen3", "deepseek-v3"])
def wide(request, tmp_path_factory):
    """A checkpoint whose heads are large enough for the kernels; of latents, values are part of the keys."""
    directory = tmp_path_factory.mktemp("wide")
    save_checkpoint(directory, request.param)
    save_tokenizer(directory)
    return directory


@pytest.fixture
def checked(monkeypatch):
    """After every chunk, what is packed is compared with what all values become when they are packed anew.

    Says how many entries were packed before.
    """
    calls, advance = [], Prefill.advance

    def checking(self, job):
        lane, group, is_last = self.lanes[job.lane], job.group, job.layer == self.model.spec.own_caches - 1
        end = min(job.before + job.done + self.chunk, job.length)
        advance(self, job)
        if is_last:  # of its chunks, only the last token attends
            return
        calls.append(int(lane.packed_until))
        values, packed = lane.caches[group].values[0], lane.packed[group]
        assert packed.numel()
        for head, blocks in enumerate(packed):
            rows = blocks.transpose(1, 2).flatten(0, 1)
            assert torch.equal(rows[:end], values[head, :end, : rows.shape[1]])

    monkeypatch.setattr(Prefill, "advance", checking)
    return calls


@needs_packing
@pytest.mark.parametrize("chunk", [32, 48, 100])
def test_prompts_one_after_the_other(wide, checked, chunk):
    llm = make(wide, budget=BUDGET, dtype="bfloat16", prefill_chunk=chunk, max_model_len=600)
    for length in (500, 33, 64, 1, 230):
        llm.generate([prompt(length, seed=length)], greedy(2))
    assert {0, chunk, 2 * chunk} <= set(checked)


@needs_packing
def test_after_a_prompt_that_was_broken_off(wide, checked):
    llm = make(wide, budget=BUDGET, dtype="bfloat16", prefill_chunk=32, max_model_len=600)
    name = llm.engine.add_request(prompt(500, seed=1), greedy(2))
    for _ in range(9):
        llm.engine.step()
    assert checked[-1] > 0  # in the middle of a layer
    llm.engine.abort(name)
    before = len(checked)
    llm.generate([prompt(400, seed=2)], greedy(2))
    assert checked[before] == 0


@needs_packing
def test_a_next_turn_packs_what_it_begins_with(wide, checked):
    llm = make(wide, budget=BUDGET, dtype="bfloat16", prefill_chunk=32, max_model_len=600, sessions=1)
    first = run(llm, prompt(200, seed=3), greedy(4, logit_bias=NO_SPECIAL), keep=True)
    assert first.saved.entries
    run(llm, prompt(90, seed=4), greedy(4, logit_bias=NO_SPECIAL), past=first.saved)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_is_refused_and_the_engine_goes_on(checkpoint):
    """In a fork torch would wait for threads that were not copied."""
    llm = make(checkpoint, budget=BUDGET)
    waiting = llm.engine.add_request(prompt(20, seed=5), greedy(3))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # rather than wait for ever
        try:
            for use in (llm.engine.step, lambda: llm.engine.add_request([1, 2], SamplingParams())):
                try:
                    use()
                except RequestError as error:
                    os.write(writing, f"{error}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read().splitlines()
    os.waitpid(child, 0)
    assert len(said) == 2
    assert all(f"created in process {os.getpid()}" in line and "after the fork" in line for line in said)
    while llm.engine.busy:
        outputs = llm.engine.step()
    assert outputs[-1].request_id == waiting
    assert len(outputs[-1].token_ids) == 3
