"""Texts that are read once: what questions are put behind, files, and many questions at once."""

import json

import pytest
import torch

from snapstream import LLM, CacheBudget, CacheFileError, RequestError, SamplingParams
from snapstream.assets import EXAMPLE
from tests.checkpoints import prompt
from tests.engine.test_conversation import run
from tests.engine.test_engine import BUDGET, greedy, make

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def shipped():
    return LLM("task-model", budget=None, max_model_len=4096, slots=2, sessions=1, report_plan=lambda plan: None)


@pytest.fixture(scope="module")
def notes():
    return json.loads(EXAMPLE.read_text())["text"]


def test_questions_to_a_full_cache_are_answered_as_in_one_prompt(shipped, notes):
    names = ["swallow", "camel", "lemming", "python", "vulture"]
    context = shipped.read(notes, chat=False)
    assert (context.tokens, context.entries, context.chat) == (2991, 2991, False)
    asked = [f" Recall the note for {name}:" for name in names]
    params = SamplingParams(max_tokens=4)
    apart = shipped.generate([notes.rstrip() + question for question in asked], params)
    behind = shipped.generate(asked, params, context=context)
    assert [output.token_ids for output in behind] == [output.token_ids for output in apart]
    assert behind[0].text == " broad vase."
    assert [output.cache.prompt_tokens for output in behind] == [output.cache.prompt_tokens for output in apart]
    assert "".join(o.new_text for o in shipped.stream(asked[1], params, context=context)) == behind[1].text


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_contexts_of_codes(shipped, notes, tmp_path, kind):
    """Questions have the same answers, from a file, too."""
    asked = [f" Recall the note for {name}:" for name in ("swallow", "camel", "lemming", "python", "vulture")]
    params = SamplingParams(max_tokens=4)
    want = shipped.generate(asked, params, context=shipped.read(notes, chat=False))
    settings = {"max_model_len": 4096, "slots": 2, "sessions": 1, "report_plan": lambda plan: None}
    llm = LLM("task-model", kv_dtype=kind, **settings)
    context = llm.read(notes, chat=False)
    assert context.nbytes < shipped.read(notes, chat=False).nbytes / 1.8
    llm.save_context(context, tmp_path / "notes.snap")
    for each in (context, llm.load_context(tmp_path / "notes.snap")):
        answers = llm.generate(asked, params, context=each)
        assert [output.text for output in answers] == [output.text for output in want]


def test_every_question_begins_from_the_same_state(checkpoint):
    llm = make(checkpoint, sessions=1)
    context = llm.read(prompt(120))
    assert (context.tokens, context.entries) == (120, BUDGET.capacity)
    before = [[tensor.clone() for tensor in layer.tensors] for layer in context.sequence.layers]
    asked = [prompt(length, seed=length) for length in (1, 7, 40, 70, 7)]
    params = greedy(30)
    alone = [run(llm, question, params, past=context.sequence).token_ids for question in asked]
    assert [output.token_ids for output in llm.generate(asked, params, context=context)] == alone
    assert alone[1] == alone[4]
    for layer, tensors in zip(context.sequence.layers, before, strict=True):
        assert all(map(torch.equal, layer.tensors, tensors))


@pytest.mark.parametrize(
    ("policy", "asked", "want"),
    [
        ("spans", None, CacheBudget.preset("multiscale-keydiff", 64)),
        ("spans", 48, CacheBudget.preset("multiscale-keydiff", 48)),
        ("mixed", None, CacheBudget.preset("multiscale-keydiff", 64)),
        ("snapstream", 48, CacheBudget.preset("multiscale-keydiff", 48)),  # a number is the same cache everywhere
        ("snapstream", None, CacheBudget.preset("snapstream", 64)),
        ("mixed", CacheBudget.preset("mixed", 48), CacheBudget.preset("mixed", 48)),
        ("mixed", CacheBudget.preset("streaming", 48), CacheBudget.preset("streaming", 48)),
    ],
    ids=str,
)
def test_nobody_asks_at_the_end_of_a_context(checkpoint, policy, asked, want):
    """Its last words have nothing to vote for; a policy that was chosen for it is used."""
    llm = make(checkpoint, CacheBudget.preset(policy, 64), sessions=1)
    sequence = llm.read(prompt(120), budget=asked).sequence
    assert sequence.budget == want
    past = run(llm, prompt(120), SamplingParams(max_tokens=0, kv_budget=want), keep=True).saved
    for layer, kept in zip(sequence.layers, past.layers, strict=True):
        assert all(map(torch.equal, layer.tensors, kept.tensors))


def test_answers_to_one_question_are_read_once(checkpoint):
    llm = make(checkpoint, sessions=1)
    context = llm.read(prompt(120))
    params = [SamplingParams(max_tokens=8, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
    names = [llm.engine.add_request(prompt(64, seed=1), one, past=context.sequence) for one in params]
    llm.engine.step()
    assert sorted(llm.engine.reading) == sorted(names)
    apart = [run(llm, prompt(64, seed=1), one, past=context.sequence).token_ids for one in params]
    assert [output.token_ids for output in llm.generate([prompt(64, seed=1)] * 3, params, context=context)] == apart
    llm.engine.reset()


def test_a_conversation_that_begins_with_a_text(shipped):
    """Its tokens are those of the whole conversation, if the text ends where a token does."""
    text = "The guard visited the flag. Note for walrus: red lamp."
    context = shipped.read(text, system="Be brief.")
    turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "There."}]
    turns.append({"role": "user", "content": "Why?"})
    whole = [{"role": "user", "content": f"{text}\n\nWhere?"}, *turns[1:]]
    laid_out = shipped.chat_prompt([{"role": "system", "content": "Be brief."}, *whole])
    assert [*context.sequence.tokens, *shipped.context_prompt(context, turns)] == laid_out
    again = shipped.context_prompt(context, [{"role": "system", "content": "Be brief."}, *turns])
    assert again == shipped.context_prompt(context, turns)


def test_a_chat_template_that_trims(shipped, monkeypatch):
    monkeypatch.setattr(shipped, "chat_template", CHATML)
    context = shipped.read("The guard.  \n\n")
    laid_out = shipped.tokenizer.encode("<|user|>The guard.", add_special_tokens=False)
    assert list(context.sequence.tokens) == laid_out
    after = shipped.context_prompt(context, [{"role": "user", "content": "Where? "}])
    assert after == shipped.tokenizer.encode("\n\nWhere?<|end|>\n<|assistant|>", add_special_tokens=False)
    monkeypatch.setattr(shipped, "chat_template", CHATML.replace("<|user|>", "<|you|>").replace("m.role", "m.role[:2]"))
    with pytest.raises(RequestError, match="differently than when the context was created"):
        shipped.context_prompt(context, [{"role": "user", "content": "Where?"}])
    monkeypatch.setattr(shipped, "chat_template", "{{ messages[0].content[:4] }}")
    with pytest.raises(RequestError, match="does not output each message text exactly once"):
        shipped.read("The guard.")


def test_what_cannot_be_asked(shipped, checkpoint):
    plain, chat = shipped.read("The guard.", chat=False), shipped.read("The guard.")
    user = {"role": "user", "content": "Where?"}
    for context, messages, message in (
        (plain, [user], "this context is plain text"),
        (chat, [{"role": "system", "content": "x"}, user], "another system message"),
        (chat, [{"role": "assistant", "content": "x"}], "first message must be the user's"),
        (chat, [{"role": "user", "content": None}], "first message must be the user's"),
        (chat, [], "first message must be the user's"),
        (chat, [{"role": "user", "content": "\ud800"}], "not valid text"),
    ):
        with pytest.raises(RequestError, match=message):
            shipped.context_prompt(context, messages)
    for text, options, message in (
        ("", {}, "text is empty"),
        (" \n", {}, "text is empty"),
        ("a", {"chat": False, "system": "x"}, "needs the model's chat template"),
        ([5, 6], {"chat": True}, "token ids are used unchanged"),
        ([5, 600000], {}, "not in the model's vocabulary"),
        ("\ud800", {}, "not valid text"),
        ([5] * 5000, {}, "at most 4095 fit"),
    ):
        with pytest.raises(RequestError, match=message):
            shipped.read(text, **options)
    with pytest.raises(RequestError, match="at least one token"):
        shipped.generate([[]], context=plain)
    with pytest.raises(RequestError, match="sessions=1"):
        make(checkpoint).read(prompt(20))
    assert not shipped.engine.busy


def test_files(shipped, notes, tmp_path, checkpoint):
    context = shipped.read(notes, system="Be brief.", budget=600)
    shipped.save_context(context, tmp_path / "a.snap")
    again = shipped.load_context(tmp_path / "a.snap")
    assert (again.chat, again.opening, again.system, again.model) == (True, "Be brief. ", "Be brief.", "task-model")
    assert (again.tokens, again.entries) == (context.tokens, 600)
    params = SamplingParams(max_tokens=8)
    texts = [shipped.generate("Recall the note for camel:", params, context=one)[0].text for one in (context, again)]
    assert texts[0] == texts[1] != ""
    llm = make(checkpoint, sessions=1)
    with pytest.raises(CacheFileError, match="another model"):
        llm.load_context(tmp_path / "a.snap")
    saved = run(llm, prompt(100), greedy(3), keep=True).saved
    llm.engine.files.save(saved, tmp_path / "b.snap", note="a conversation")
    with pytest.raises(CacheFileError, match="holds a conversation"):
        llm.load_context(tmp_path / "b.snap")
    with pytest.raises(CacheFileError, match="could not be read"):
        llm.load_context(tmp_path / "c.snap")


def test_an_interrupt_while_a_text_is_read_leaves_nothing(checkpoint, monkeypatch):
    llm = make(checkpoint, sessions=1)

    def interrupted(reading):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.model_runner.prefiller, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.read(prompt(100))
    assert not llm.engine.request_ids or not llm.engine.step()
    assert llm.read(prompt(100)).tokens == 100


@pytest.mark.parametrize("text", ["\n\nWhere is it?", " Where?", "s", "Ünï 😀", ""])
def test_tokens_that_go_on(shipped, text):
    assert shipped.engine.texts.after(text) == shipped.tokenizer.encode(text, add_special_tokens=False)
