"""Speculative decoding behind the API: the same answers, and what is said of guesses."""

import openai
import pytest

from snapstream import LLM
from tests.checkpoints import prompt
from tests.engine.test_engine import BUDGET, greedy, make
from tests.engine.test_speculation import Oracle, answers_of
from tests.serving.servers import metric, post, running

PROMPTS = [prompt(70), prompt(60, seed=1)]
SETTINGS = {"max_model_len": 500, "slots": 3, "prefill_chunk": 32, "sessions": 2}


@pytest.fixture(scope="module")
def guessing(checkpoint):
    """With guesses that are right more often than not, where the likeliest token is asked for."""
    llm = LLM(str(checkpoint), budget=BUDGET, speculative="lookup", speculative_tokens=3, **SETTINGS)
    llm.engine.runner.cost.saw_guesses = lambda *seen: None  # guesses are made, whatever this machine is busy with
    known = answers_of(make(checkpoint, max_model_len=500), PROMPTS, greedy(120))
    llm.engine.runner.drafter = Oracle(known, 0.7)
    with running(llm) as server:
        yield server


@pytest.fixture(scope="module")
def plain(checkpoint):
    with running(LLM(str(checkpoint), budget=BUDGET, **SETTINGS)) as server:
        yield server


BODIES = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0, "stop": ["w11"], "logprobs": 2},
    {"temperature": 1.0, "seed": 3, "n": 3, "ignore_eos": True},
    {"temperature": 0.5, "seed": 4, "presence_penalty": 0.5, "min_tokens": 20},
]


@pytest.mark.parametrize("body", BODIES)
def test_answers_are_the_same(guessing, plain, body):
    answers = [post(server, prompt=PROMPTS[0], max_tokens=120, **body).json() for server in (plain, guessing)]
    (first, want), (second, got) = ((answer.pop("usage"), answer["choices"]) for answer in answers)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine["text"], mine["finish_reason"]) == (theirs["text"], theirs["finish_reason"])
        if theirs["logprobs"]:
            assert mine["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
    nothing = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert first.pop("completion_tokens_details") == nothing
    details = second.pop("completion_tokens_details")
    assert first == second
    assert sum(details.values()) > 0


def test_what_was_guessed_is_counted(guessing):
    before = [metric(guessing, f"snapstream_{kind}_tokens_total") for kind in ("drafted", "accepted")]
    client = openai.OpenAI(base_url=guessing.url + "/v1", api_key="none")
    events = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPTS[1],
            max_tokens=100,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    details = events[-1].usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    after = [metric(guessing, f"snapstream_{kind}_tokens_total") for kind in ("drafted", "accepted")]
    assert [now - was for now, was in zip(after, before, strict=True)] == [accepted + rejected, accepted]
    assert accepted > 10


def test_a_session_goes_on_the_same(guessing, plain):
    said = []
    for server in (plain, guessing):
        history, texts = " ".join(f"w{token}" for token in prompt(90)), []
        for turn in range(3):
            reply = post(server, prompt=history, session_id="s", max_tokens=40, temperature=0, ignore_eos=True)
            answer = reply.json()
            texts.append(answer["choices"][0]["text"])
            history += texts[-1] + f" w{20 + turn} w30"
        said.append(texts)
    assert said[0] == said[1]
