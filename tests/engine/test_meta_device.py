"""What a GPU would be asked, seen without one: every tensor on the ``meta`` device, which has shapes but no numbers.

Whatever needs a number where it is not asked for openly fails there, and so does whatever mixes devices.
"""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snapstream import CacheBudget, SamplingParams
from snapstream.attention import SdpaAttention, TritonAttention
from snapstream.cache import layer
from snapstream.compression import compress, scoring
from snapstream.engine import engine, runner
from snapstream.engine.drafters import next_token
from snapstream.engine.prefill import job, prefill, result
from snapstream.engine.settings import set_up
from snapstream.kernels import compression as kernels_of_compression
from snapstream.kernels import triton as kernels
from snapstream.models.decoder import DecoderModel
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine import conftest
from tests.engine.test_engine import make

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpretedFunction

from snapstream.kernels.triton.program import TritonProgram

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device: test_cuda.py")
META = torch.device("meta")


class Launched(TritonAttention):
    """Launches, where a plan of memory would do without."""

    def program(self, operations, work):
        return TritonProgram(operations, work)


@pytest.fixture(params=["triton", "sdpa"])
def copies(request, monkeypatch):
    """Engines that are made meanwhile are on the meta device; what was copied to the host, call by call."""
    calls = []

    def to_host(tensors):
        assert all(tensor.device == META for tensor in tensors)
        calls.append([tuple(tensor.shape) for tensor in tensors])
        return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    def launch(*arguments, **options):
        assert all(each.device == META for each in arguments if isinstance(each, torch.Tensor))

    def set_up_there(*arguments, **settings):
        backend = Launched(META) if request.param == "triton" else SdpaAttention()
        return dataclasses.replace(set_up(*arguments, **settings), device=META, backend=backend)

    def load(checkpoint, spec, dtype, device):
        with META:
            return DecoderModel(spec).to(device=META, dtype=dtype)

    monkeypatch.setattr(kernels, "takes", lambda x: request.param == "triton" and x.device == META)
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: launch)
    monkeypatch.setattr(conftest, "check_integrity", lambda one: None)  # it looks at numbers
    monkeypatch.setattr(engine, "set_up", set_up_there)
    monkeypatch.setattr(engine, "load_model", load)
    monkeypatch.setattr(engine, "available_memory", lambda *arguments: None)
    for module in (runner, prefill, job, result, next_token):
        monkeypatch.setattr(module, "to_host", to_host)
    # Operations would choose what says the shape of their result alone.
    monkeypatch.setattr(scoring, "window_attention", kernels_of_compression._window_attention)
    monkeypatch.setattr(scoring, "smoothed", kernels_of_compression._smoothed)
    monkeypatch.setattr(compress, "selected", kernels_of_compression._selected)
    monkeypatch.setattr(layer, "copy_rows", kernels_of_compression._copy_rows)
    return calls


@pytest.fixture(params=["llama3-gqa", "qwen3", "deepseek-v3"])
def llm(request, tmp_path, copies):
    save_checkpoint(tmp_path, request.param)
    save_tokenizer(tmp_path)
    # As on a GPU, where experts run in bfloat16 alone.
    options = {"device": "cpu", "dtype": "bfloat16", "prefill_chunk": 64, "decode_steps": 3}
    return make(tmp_path, max_model_len=200, slots=3, sessions=1, **options)


class NoNumbers(TorchDispatchMode):
    """Refuses assignments of numbers, such as ``tensor[slot] = 1.0``: on CUDA they wait, where ``fill_`` does not."""

    def __init__(self):
        super().__init__()
        self.numbers = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        aten = torch.ops.aten
        if function in (aten.copy_.default, aten.index_put_.default):
            assert not any(arguments[-1] is number or arguments[1] is number for number in self.numbers), "assignment"
        result = function(*arguments, **(options or {}))
        if function is aten.scalar_tensor.default:
            self.numbers.append(result)
        return result


def test_what_is_refused():
    row = torch.zeros(3, device=META)
    with NoNumbers(), pytest.raises(AssertionError, match="assignment"):
        row[1] = 2.0
    with NoNumbers():
        row[1].fill_(2.0)


def test_nothing_waits_for_the_device_in_a_step(llm, copies):
    """But for the tokens of a launch, all at once, and for what is said of a prompt when it has been read."""
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=1, logprobs=2, logit_bias={5: 1.0}, min_tokens=3),
        SamplingParams(max_tokens=8, kv_budget=CacheBudget(2, 20, 9, window=4, pooling="max"), return_kept_tokens=True),
        SamplingParams(max_tokens=30, forced=tuple(prompt(7)), presence_penalty=1.0, ignore_eos=True),
    ]
    for length, one in zip((1, 60, 130, 47), params, strict=True):
        llm.engine.add_request(prompt(length, seed=length), one)
    outputs = []
    while llm.engine.busy:
        reads, copies[:] = bool(llm.engine.reading or llm.engine.table.waiting), []
        with NoNumbers():
            outputs += llm.engine.step()
        # One for a launch; of a prompt that has been read, its first token, its shares, and the tokens kept.
        assert len(copies) <= (4 if reads else 1), copies
    assert all(output.error is None for output in outputs), outputs
    finished = {output.request_id: len(output.token_ids) for output in outputs if output.finished}
    assert sorted(finished.values()) == [8, 9, 20, 30]


def test_prompts_that_are_scored_and_conversations(llm, copies):
    scored = llm.generate(prompt(100), SamplingParams(max_tokens=2, prompt_logprobs=2))[0]
    assert scored.error is None
    assert len(scored.prompt_logprobs) == 100
    saved = None
    for turn in range(3):
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        name = llm.engine.add_request(prompt(60, seed=turn), params, past=saved, keep=True)
        outputs = iter(lambda: llm.engine.step()[-1], None)
        last = next(output for output in outputs if output.finished and output.request_id == name)
        assert last.error is None
        saved = last.saved
        assert all(tensor.device == META for each in saved.layers for tensor in each.tensors)


@pytest.mark.parametrize(("family", "speculative"), [("qwen3", "lookup"), ("deepseek-v3", "mtp")])
@pytest.mark.parametrize("copies", ["triton"], indirect=True)
def test_nothing_waits_for_the_device_while_guesses_are_verified(tmp_path, family, speculative, copies):
    """The host is told once what was taken, and how much of it is certain."""
    save_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path)
    options = {"device": "cpu", "dtype": "bfloat16", "speculative": speculative, "speculative_tokens": 5}
    llm = make(tmp_path, max_model_len=200, slots=3, **options)
    decode = llm.engine.model_runner.decoder
    assert list(decode.verifications) == [2, 4, 6]
    for greedy in (True, False):
        with NoNumbers():
            taken, certain = decode.verify({0: [5], 2: [6, 7, 8]}, greedy=greedy, forced={2: [6, 7]})
        assert [each.tokens.shape for each in taken] == [(3,)] * 4
        assert certain.shape == (3,)
        with NoNumbers():
            assert decode.read({1: [5, 6]}, certain=greedy).shape == (3,)
            if decode.mtp is not None:
                assert decode.mtp.guess(5).shape == (3, 5)
    assert copies == []
    if decode.mtp is not None:  # a prompt goes through the module, too
        llm.engine.add_request(prompt(100), SamplingParams(max_tokens=1))
        outputs = []
        with NoNumbers():
            while llm.engine.busy:
                outputs += llm.engine.step()
        assert [len(output.token_ids) for output in outputs] == [1]
