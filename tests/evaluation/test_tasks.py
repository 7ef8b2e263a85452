"""The generated tasks: their length, their answers (found again by reading the text), their depth."""

import json
import random
import re
from collections import Counter

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from snapstream import ConfigurationError
from snapstream.assets import TASK_MODEL
from snapstream.evaluation.scoring import found_parts
from snapstream.evaluation.tasks import TASKS, TooShortError, find_tasks, make_sample
from snapstream.evaluation.tasks.prose import paragraphs


@pytest.fixture(scope="module")
def tokenizers():
    """The shipped word-level tokenizer, and a byte-level BPE as large models have it, trained on the tasks' texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [make_sample(task, 600, seed, len).prompt for task in TASKS.values() for seed in range(3)]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    return [AutoTokenizer.from_pretrained(TASK_MODEL), PreTrainedTokenizerFast(tokenizer_object=bpe)]


def counter(tokenizer):
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def words(text):
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_prompts_have_the_asked_number_of_tokens(tokenizers, task):
    for tokenizer in tokenizers:
        count = counter(tokenizer)
        for length in (700, 1024, 5000):
            sample = make_sample(task, length, length, count, decode=300)
            tokens = count(sample.prompt + sample.lead)
            # What is missing is less than a sentence; of a novel, a short paragraph; of a list, a word for each of it.
            missing = 100 if task.family in ("prose", "aggregation") else 60
            assert length - missing <= tokens <= length, (length, tokens)
            if task.decodes_filler:
                assert 300 <= count(sample.reply) < 300 + 60 + (40 if task.follow_up == "told" else 0)
            assert bool(sample.second) == (task.follow_up != "none")


@pytest.mark.parametrize("name", ["needle", "multikey", "multivalue", "late-question"])
def test_the_words_before_a_chat_models_answer_have_room(name):
    plain, chat = (make_sample(TASKS[name], 800, 3, words, chat=chat) for chat in (False, True))
    assert plain.begins == plain.opening == ""
    key = re.search(r"notes? for (\w+):$", chat.second or chat.prompt)[1]
    begins, other = (chat.opening, chat.begins) if chat.second else (chat.begins, chat.opening)
    assert begins.endswith(f"for {key}:")
    assert other == ""
    assert words(chat.prompt + begins) <= 800


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_equal_arguments_give_equal_samples(task):
    made = make_sample(task, 800, 1, words)
    assert made == make_sample(task, 800, 1, words)
    assert made.prompt != make_sample(task, 800, 2, words).prompt
    assert make_sample(task, 900, 1, words).prompt[: len(made.prompt)] != made.prompt


def notes(text):
    found = re.findall(r"Note for (\w+): ([a-z ]+)\.", text)
    return {key: [value for other, value in found if other == key] for key, _ in found}


def solve(task, sample):
    """The parts of the answer, found by reading the text as a person would."""
    prompt, asked = sample.prompt, sample.second or sample.prompt
    name = task.name
    if name == "told-later":
        return notes(sample.reply)[re.search(r"Recall the note for (\w+):$", asked).group(1)]
    if name in ("needle", "multikey", "late-question", "long-decode"):
        return notes(prompt)[re.search(r"Recall the note for (\w+):$", asked).group(1)]
    if name == "multivalue":
        return notes(prompt)[re.search(r"Recall the 4 notes for (\w+):$", prompt).group(1)]
    if name == "multiquery":
        keys = re.search(r"Recall the notes for ([\w: ]+):$", prompt).group(1).split(": ")
        assert sample.lead.endswith(f" {keys[0]}:")
        return [notes(prompt)[key][0] for key in keys]
    if name in ("passkey", "number"):
        first, second = re.findall(r"\d+", prompt)
        assert first == second
        return [first]
    if name == "kv":
        pairs = json.loads(prompt[prompt.index("{") : prompt.index("}") + 1])
        key = re.search(r'The value of "(\d+)"\?$', prompt).group(1)
        assert sample.lead == f'\n{{"{key}": "'
        return [pairs[key]]
    if name == "tracking":
        copies = dict(re.findall(r"Copy (\w+) to (\w+)\.", prompt))
        at, chain = re.search(r"Where was (\d+) copied to\?$", prompt).group(1), []
        while at in copies:
            at = copies[at]
            chain.append(at)
        return chain
    if name in ("common-words", "frequent-words"):
        counts = Counter(prompt[prompt.index("others.") + 8 : prompt.index(". Which")].split())
        best = counts.most_common(4)
        assert best[2][1] > best[3][1] * 1.5
        return [word for word, _ in best[:3]]
    if name == "records":
        found = re.findall(r"\nThe phone number of (\w+) is (\d+)\.", prompt)
        lines = [tuple(json.loads(line).values()) for line in (sample.lead + sample.answer).splitlines()]
        assert lines == found
        return [value for _, value in found[1:]]
    if task.family == "prose":
        question = asked[asked.rindex("\n\n") + 2 :]
        who = re.fullmatch(r"What is the (phone number of \w+)\?|Where was the (\w+) left\?", question)
        what = who.group(1) or who.group(2)
        return re.findall(rf"\nThe {what} (?:is|was left in the) (\w+)\.", prompt + sample.reply)
    assert name == "qa"
    thing, seller = re.search(r"Who bought the (\w+) from the (\w+)\?$", prompt).groups()
    return re.findall(rf"The {seller} sold the {thing} to the (\w+)", prompt)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_the_text_tells_the_answer(task):
    copied = 0
    for seed in range(25):
        sample = make_sample(task, random.Random(seed).choice([600, 1500, 4000]), seed, words, decode=100)
        want = solve(task, sample)
        assert set(want) == set(sample.parts)
        assert len(want) == len(sample.parts)
        assert not set(sample.parts) & set(sample.rivals)
        assert found_parts(sample.parts, sample.rivals, sample.answer) == [True] * len(sample.parts)
        copied += all(found_parts(sample.parts, sample.rivals, sample.prompt[60:]))
        for part in sample.parts:
            assert part in sample.answer
            if task.follow_up != "none":
                assert part not in sample.second
                assert (part in sample.reply) == (task.follow_up == "told") == (part not in sample.prompt)
    if task.name in ("multikey", "multivalue", "multiquery", "tracking", "common-words", "frequent-words"):
        assert copied <= 12  # who copies the text has seldom answered


@pytest.mark.parametrize("task", [task for task in TASKS.values() if task.has_depth], ids=lambda task: task.name)
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.8, 1.0])
def test_depth_is_where_the_answer_lies(task, depth):
    """Of a chain, where it begins."""
    before = {"qa": lambda sample: sample.lead + " ", "tracking": lambda sample: sample.lead[13:] + " "}
    for seed in range(4):
        sample = make_sample(task, 6000, seed, words, depth=depth, decode=10)
        body = sample.prompt[: sample.prompt.rindex("Recall")] if "Recall" in sample.prompt else sample.prompt
        place = body.index(before.get(task.name, lambda _: "")(sample) + sample.parts[0])
        assert abs(place / len(body) - depth) < 0.04


def test_a_text_that_is_too_short_is_refused():
    for task in TASKS.values():
        with pytest.raises(TooShortError):
            make_sample(task, 12, 0, words)


def test_tasks_are_found_by_name():
    assert [task.name for task in find_tasks(["kv", "needle", "kv"])] == ["kv", "needle"]
    generated, prose = find_tasks(["all"]), find_tasks(["prose"])
    assert [*generated, *prose] == list(TASKS.values())
    assert [task.name for task in prose] == [
        *("phone", "phones", "room", "late-phone", "long-phone", "told-phone", "records")
    ]
    assert find_tasks(["prose", "kv"]) == [*prose, TASKS["kv"]]
    with pytest.raises(ConfigurationError, match="unknown task haystack; allowed: all, prose, needle"):
        find_tasks(["needle", "haystack"])
    with pytest.raises(ConfigurationError, match="unknown task none"):
        find_tasks([])


def test_prose_goes_on_as_it_was_written():
    """Two facts apart, and what did not fit at the end, a text is a part of the book."""
    book = paragraphs()
    assert len(book) > 500
    assert all(len(one) > 50 for one in book)
    sample = make_sample(TASKS["phone"], 3000, 1, words)
    inside = [line for line in sample.prompt.splitlines()[1:-2] if line in book]
    first = book.index(inside[0])
    assert inside[:10] == list(book[first : first + 10])
    assert len(inside) > 30
