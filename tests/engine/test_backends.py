"""A new attention backend is used for everything: prompts, single steps, and steps that verify guesses."""

import pytest
import torch

from snapstream.attention import SdpaAttention
from snapstream.attention.operation import with_backend
from snapstream.kernels.operations import Attend, PlainProgram
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_engine import BUDGET, greedy, make
from tests.engine.test_speculation import drafting


class Counting(SdpaAttention):
    """A backend of somebody else: counts what it is asked, and notes how it saw the caches."""

    calls = 0

    def decode(self, query, keys, values, valid, scale):
        Counting.calls += 1
        return super().decode(query, keys, values, valid, scale)


@pytest.fixture(params=["qwen3", "deepseek-v3"])
def model(request, tmp_path):
    save_checkpoint(tmp_path, request.param)
    save_tokenizer(tmp_path)
    return tmp_path


def test_it_verifies_guesses(model, monkeypatch):
    prompts = [prompt(length, seed=length) for length in (5, 60, 131)]
    want = [one.token_ids for one in make(model).generate(prompts, greedy(40))]
    monkeypatch.setattr("snapstream.attention._BACKENDS", {"sdpa": Counting, "cpu": Counting})
    answers = {tuple(one): list(tokens) for one, tokens in zip(prompts, want, strict=True)}
    llm = drafting(model, answers, BUDGET, attention="sdpa", share=0.6)
    monkeypatch.setattr(Attend, "run", None)  # nothing else attends
    Counting.calls = 0
    outputs = llm.generate(prompts, greedy(40))
    assert [one.token_ids for one in outputs] == want
    assert sum(one.accepted for one in outputs) > 10
    assert Counting.calls > 20


@pytest.mark.parametrize("limit", [2, 3, 9])
def test_what_it_sees_is_what_plain_torch_sees(model, monkeypatch, limit):
    """And the caches are as before, also where a ring is shorter than a step, and after an error."""
    llm = make(model, BUDGET, speculative="lookup", speculative_tokens=3, attention="sdpa", slots=3)
    decode = llm.engine.model_runner.decoder
    work = decode.verifications[4]._work
    torch.manual_seed(0)
    for tensor in (*work.caches[0].tensors, *work.pending[0].tensors):
        tensor.normal_()
    for name, buffer in work.buffers.items():
        if buffer.is_floating_point() and name != "logits":
            buffer.normal_()
    slots = work.slots
    slots.base.fill_(0)
    slots.limit.fill_(limit)
    slots.count.copy_(torch.tensor([0, limit - 1, 7 * limit]))
    slots.active.copy_(torch.tensor([True, True, False]))
    slots.drafted.copy_(torch.tensor([3, 1, 0]))
    (plain, *_) = [each for each in decode.model.operations() if isinstance(each, Attend)]
    (ours,) = with_backend([plain], Counting())
    before = [tensor.clone() for tensor in work.caches[0].tensors]
    target = plain.target.of(work.buffers)
    target.zero_()
    PlainProgram([plain], work).run()
    want = target.clone()
    target.zero_()
    PlainProgram([ours], work).run()
    torch.testing.assert_close(target, want)
    for kept, tensor in zip(before, work.caches[0].tensors, strict=True):
        assert torch.equal(kept, tensor)

    class Failing(Counting):
        def decode(self, query, keys, values, valid, scale):
            if not torch.equal(keys, before[0]):
                raise KeyboardInterrupt
            return super().decode(query, keys, values, valid, scale)

    with pytest.raises(KeyboardInterrupt):
        PlainProgram(with_backend([plain], Failing()), work).run()
    for kept, tensor in zip(before, work.caches[0].tensors, strict=True):
        assert torch.equal(kept, tensor)
