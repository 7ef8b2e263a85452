"""Files of questions: what is read from them, how outputs are scored, and which questions are asked where."""

import gzip
import itertools
import json
import socket
import subprocess
import sys
import time

import pytest

from snapstream import ConfigurationError
from snapstream.evaluation.hosts import Prompts
from snapstream.evaluation.policies import Variant
from snapstream.evaluation.questions import code
from snapstream.evaluation.questions.files import read_all_questions, read_questions
from snapstream.evaluation.questions.plan import QuestionPlan
from snapstream.evaluation.questions.question import CHOICE_OPENING, Scoring
from snapstream.evaluation.questions.scores import score


def write(path, *lines):
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return str(path)


# -- the documented form --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.jsonl.gz"])
def test_the_documented_form(tmp_path, name):
    made = read_questions(
        write(
            tmp_path / name,
            {"text": "The lamp is red.", "question": "Which color?", "answers": "red"},
            {"text": "The lamp is red.", "question": "What is red?", "answers": ["lamp", "the lamp"], "score": "f1"},
            {
                "text": "Another text.",
                "questions": [
                    {"question": "Which?", "choices": ["an egg", "a text"], "answers": "a text", "id": "one"},
                    {"question": "Which?", "choices": ["an egg", "a text"], "answers": ["A", "B"], "opening": "("},
                    {"question": "Write f.", "program": "def f():\n", "test": "assert f() == 1", "max_tokens": 9},
                ],
            },
        )
    )
    assert (made.name, made.form, made.questions) == ("mine", "snapstream", 5)
    # Neighbours with the same text share it.
    assert [text.text for text in made.texts] == ["The lamp is red.", "Another text."]
    color, red, which, both, write_f = (question for text in made.texts for question in text.questions)
    assert [one.name for one in (color, red, which, both, write_f)] == ["1", "2", "one", "3.2", "3.3"]
    assert color.scoring == Scoring("contains", ("red",))
    assert red.scoring == Scoring("f1", ("lamp", "the lamp"))
    assert which.ask == "Which?\nA. an egg\nB. a text"
    assert (which.scoring.answers, which.opening) == (("B",), CHOICE_OPENING)
    assert (both.scoring.answers, both.opening) == (("A", "B"), "(")
    assert (write_f.scoring.kind, write_f.max_tokens) == ("code", 9)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no questions"),
        ([{"text": "a"}], "the fields text match no known form"),
        ([["a list"]], "line 1: str instead of a JSON object"),
        (
            [{"question": "a?", "answers": "b", "colour": 1}],
            "line 1: colour: unknown field; allowed: question, answers",
        ),
        ([{"question": "a?", "answers": "b", "score": "bleu"}], "line 1: score: Input should be 'contains'"),
        ([{"question": "a?", "answers": "b", "max_tokens": 0}], "line 1: max_tokens: Input should be greater"),
        ([{"question": "a?", "answers": [1]}], "line 1: answers"),
        ([{"question": "a?", "answers": " "}], "line 1: 'answers' is missing, or one of them is empty"),
        ([{"question": "a?", "answers": ["b", ""]}], "line 1: 'answers' is missing, or one of them is empty"),
        ([{"question": "a?", "answers": "b", "stop": ["x", ""]}], "line 1: a stop string is empty"),
        ([{"answers": "b"}], "line 1: there is neither a text nor a question"),
        ([{"question": "a\ud800?", "answers": "b"}], "line 1, is not valid JSON"),
        ([{"question": "a?", "score": "code"}], "line 1: code is scored by running it, but there is no 'test'"),
        ([{"question": "a?", "choices": ["b", "c"], "answers": "d"}], "'d' is neither one of the choices nor"),
        ([{"question": "a?", "choices": ["b", "c"], "answers": "C"}], "'C' is neither one of the choices nor"),
        ([{"question": "a?", "choices": ["b"], "answers": "c", "score": "class"}], "a class that is none of the"),
        ([{"text": "a", "answers": "b", "questions": [{"answers": "c"}]}], "line 1: answers belong to a question"),
        ([{"questions": []}], "line 1: questions: List should have at least 1 item"),
        ([{"text": "a", "questions": [{"answers": "c"}, {"answers": ""}]}], "line 1: 1.2: 'answers' is missing"),
        ([{"question": "a?", "answers": "b", "id": "x"}] * 2, "two questions are named 'x'"),
    ],
)
def test_what_is_no_question_is_said(tmp_path, lines, message):
    with pytest.raises(ConfigurationError) as error:
        read_questions(write(tmp_path / "bad.jsonl", *lines))
    assert message in str(error.value)
    assert str(tmp_path / "bad.jsonl") in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("not-there.jsonl", None, "no such file"),
        ("a.jsonl", b'{"question": ', "is not valid JSON"),
        ("a.jsonl", b"\xff\xfe", "is not valid JSON"),
        ("a.jsonl.gz", b"not gzip", "cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b'{"question": "a?", "answers": "b"}' * 99, mtime=0)[:40], "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        read_questions(str(tmp_path / name))


def test_an_incomplete_address_of_the_hub():
    with pytest.raises(ConfigurationError, match="hf://datasets/OWNER/NAME/FILE"):
        read_questions("hf://datasets/owner/name")


def test_a_file_that_is_one_array(tmp_path):
    (tmp_path / "data.json").write_text(
        json.dumps([{"question": "a?", "answers": "b"}, {"question": "c?", "answers": "c"}])
    )
    assert read_questions(str(tmp_path / "data.json")).questions == 2


def test_the_lab_needs_no_extra():
    """Without one, it runs generated tasks and writes Markdown; files of questions say what they need."""
    program = """
import sys
sys.modules.update(dict.fromkeys(("pydantic", "rouge_score", "matplotlib", "openai", "lm_eval")))
import snapstream.evaluation.lab, snapstream.evaluation.engine_host, snapstream.evaluation.markdown
from snapstream.errors import ConfigurationError
try:
    import snapstream.evaluation.questions.files
except ConfigurationError as error:
    assert "need pydantic" in str(error), error
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- published forms ------------------------------------------------------------------------------------------------

PAIRS = [[f"key-{n}", f"value-{n}"] for n in range(5)]
PUBLISHED = {
    "tpo": (
        "l-eval",
        {
            "input": "A lecture.",
            "instructions": ["Who?\nA. he\nB. she", "Which?"],
            "outputs": ["B", "AC"],
            "evaluation": "exam",
        },
        [("choice", ("B",)), ("choice", ("A", "C"))],
    ),
    "gsm100": (
        "l-eval",
        {"input": "16 sums.", "instructions": ["How many?"], "outputs": ["1,018"], "evaluation": "exam"},
        [("number", ("1,018",))],
    ),
    "topic_retrieval_longchat": (
        "l-eval",
        {"input": "Talk.", "instructions": ["Topic?"], "outputs": ["The role of art."], "evaluation": "exam"},
        [("contains", ("The role of art",))],
    ),
    "sci_fi": (
        "l-eval",
        {"input": "A story.", "instructions": ["So?"], "outputs": ["True [fact: False]"], "evaluation": "exam"},
        [("choice", ("A",))],
    ),
    "multidoc_qa": (
        "l-eval",
        {"input": "Pages.", "instructions": ["Why?"], "outputs": ["Because."], "evaluation": "f1"},
        [("f1", ("Because.",))],
    ),
    "quality": (
        "l-eval",
        {"input": "A story.", "instructions": ["So?"], "outputs": ["(B) Their ship."], "evaluation": "exam"},
        [("choice", ("B",))],
    ),
    "codeU": (
        "l-eval",
        {"input": "Code.", "instructions": ["So?"], "outputs": ["[6 15]"], "evaluation": "exam"},
        [("contains", ("[6 15]",))],
    ),
    "gov_report_summ": (
        "l-eval",
        {"input": "A report.", "instructions": ["Summarize."], "outputs": ["Short."], "evaluation": "rouge"},
        [("rouge-l", ("Short.",))],
    ),
    "altqa_4k": (
        "bamboo",
        {"content": "A number, please.\n\nQuestion:\nwhen?\n\nDocument:\n in 1964 . \n", "answer": "1964"},
        [("contains", ("1964",))],
    ),
    "altqa_16k": (
        "bamboo",
        {"content": "A number, please.\n\nDocument:\n in 1964 . \n\nQuestion:\nwhen?\n", "answer": "1964"},
        [("contains", ("1964",))],
    ),
    "meetingqa_4k": (
        "bamboo",
        {"content": "Talk.", "question": "Who?", "options": ["A. he", "B. she"], "answer": "B", "evidence": ""},
        [("choice", ("B",))],
    ),
    "private_eval_4k": (
        "bamboo",
        {
            "prompt": "# [start]\n# # numset(x): An array.\n# # total(x): A sum.\n# [end]\nimport beatnum as bn\na = ",
            "canonical_solution": [" bn.numset([1])"],
            "test": "",
            "task_id": "x",
            "entry_point": "none",
        },
        [("contains-all", ("numset",))],
    ),
    "kv5": (
        "lost-in-the-middle",
        {"ordered_kv_records": PAIRS, "key": "key-0", "value": "value-0"},
        [("contains", ("value-0",))],
    ),
    "nq": (
        "lost-in-the-middle",
        {"question": "who?", "answers": ["he", "she"], "ctxs": [{"title": "T", "text": "It was he.", "isgold": True}]},
        [("phrase", ("he", "she"))],
    ),
    "hotpotqa": (
        "longbench",
        {"input": "Who?", "context": "Pages.", "answers": ["he"], "dataset": "hotpotqa", "language": "en"},
        [("f1", ("he",))],
    ),
    "lcc": (
        "longbench",
        {"input": "", "context": "import x\n", "answers": ["x.run()"], "dataset": "lcc_e", "language": "python"},
        [("similarity", ("x.run()",))],
    ),
    "trec": (
        "longbench",
        {"input": "Question: x?\nType:", "context": "Pairs.", "answers": ["City"], "dataset": "trec", "language": "en"},
        [("contains", ("City",))],
    ),
    "passage_retrieval_zh": (
        "longbench",
        {
            "input": "摘要",
            "context": "段落1",
            "answers": ["段落3"],
            "dataset": "passage_retrieval_zh",
            "language": "zh",
        },
        [("number", ("段落3",))],
    ),
    "passage_count": (
        "longbench",
        {"input": "", "context": "Paragraphs.", "answers": ["7"], "dataset": "passage_count", "language": "en"},
        [("number", ("7",))],
    ),
    "longbench2": (
        "longbench-v2",
        {"context": "Pages.", "question": "Who?", "answer": "C"} | {f"choice_{x}": f"it is {x}" for x in "ABCD"},
        [("choice", ("C",))],
    ),
    "longbook_choice_eng": (
        "infinitebench",
        {"context": "A book.", "input": "Who?", "answer": ["she"], "options": ["he", "she", "it", "they"]},
        [("choice", ("B",))],
    ),
    "kv_retrieval": (
        "infinitebench",
        {"context": "Pairs.", "input": "Key: x", "answer": ["value"], "options": []},
        [("contains", ("value",))],
    ),
    "math_find": (
        "infinitebench",
        {"context": "[1, 61.0]", "input": "The largest number?", "answer": 61.0},
        [("contains", ("61",))],
    ),
    "run": (
        "infinitebench",
        {"context": "Code.", "input": "Please give the return value of f(3).", "answer": 7, "options": []},
        [("number", ("7",))],
    ),
    "longbook_sum_eng": (
        "infinitebench",
        {"context": "A book.", "input": "", "answer": ["Short."]},
        [("rouge-l", ("Short.",))],
    ),
    "niah_multivalue": (
        "ruler",
        {"index": 0, "input": "Hay.\nHay.\nWhat are the numbers?", "outputs": ["12", "34"], "length": 9},
        [("contains-all", ("12", "34"))],
    ),
    "qa_1": (
        "ruler",
        {"index": 0, "input": "Documents.\nWho?", "outputs": ["he", "him"], "length": 9},
        [("contains", ("he", "him"))],
    ),
    "ruler_8k": (
        "ruler",
        {"input": "Answer the question based on the given documents.\nHe.\nWho?", "outputs": ["he", "him"]},
        [("contains", ("he", "him"))],
    ),
    "humaneval": (
        "humaneval",
        {
            "task_id": "HumanEval/0",
            "prompt": "def f(x):\n    '''Twice x.'''\n",
            "entry_point": "f",
            "canonical_solution": "    return 2 * x\n",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        },
        [("code", ())],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_forms_are_recognized(tmp_path, name):
    form, fields, scorings = PUBLISHED[name]
    made = read_questions(write(tmp_path / f"{name}.jsonl", fields))
    assert (made.name, made.form) == (name, form)
    (text,) = made.texts
    assert [(one.scoring.kind, one.scoring.answers) for one in text.questions] == scorings
    again = read_questions(f"{form}:{tmp_path / name}.jsonl")
    assert again == made


def test_the_question_of_a_document_stands_behind_it(tmp_path):
    """Wherever it stands in the file."""
    texts = [
        read_questions(write(tmp_path / f"{n}.jsonl", PUBLISHED[n][1])).texts[0] for n in ("altqa_4k", "altqa_16k")
    ]
    for text in texts:
        assert " ".join(text.text.split()) == "A number, please. Document: in 1964 ."
        assert text.questions[0].ask == "Question: when?"


def test_pairs_stay_as_they_are(tmp_path):
    (text,) = read_questions(write(tmp_path / "kv5.jsonl", PUBLISHED["kv5"][1])).texts
    assert list(json.loads(text.text.partition(":\n\n")[2]).items()) == [tuple(pair) for pair in PAIRS]
    with pytest.raises(ConfigurationError, match="are not among its pairs"):
        read_questions(write(tmp_path / "kv5.jsonl", PUBLISHED["kv5"][1] | {"key": "another"}))


def test_choices_of_bamboo_may_be_incomplete(tmp_path):
    """Some lines hold sentences of the text instead of choices, others besides them, or two choices in one."""
    line = PUBLISHED["meetingqa_4k"][1]
    options = [["A. he", "B. she", "It was she."], ["A: he\nB: she"], ["It was she."], ["A. he", "C. she"]]
    made = read_questions(write(tmp_path / "meetingqa.jsonl", *(line | {"options": each} for each in options)))
    assert [one.scoring.choices for text in made.texts for one in text.questions] == [("he", "she")] * 2
    assert made.left_out == (("whose choices are not in the file", 2),)
    (note,) = QuestionPlan([made], [Variant("full")], Prompts(Words(), chat=False)).notes
    assert note == "left out of meetingqa: 2 questions whose choices are not in the file"
    none = read_questions(write(tmp_path / "paperqa.jsonl", line | {"options": options[2]}))
    with pytest.raises(ConfigurationError, match="nothing is left to ask; left out of paperqa: 1 questions"):
        QuestionPlan([none], [Variant("full")], Prompts(Words(), chat=False))


def test_rulers_files_are_named_by_their_directory(tmp_path):
    (tmp_path / "niah_single_1").mkdir()
    line = {"input": "Hay.\nWhat is it?", "outputs": ["12"], "answer_prefix": " It is"}
    made = read_questions(write(tmp_path / "niah_single_1" / "validation.jsonl", line))
    assert made.name == "niah_single_1"
    assert made.texts[0].questions[0].opening == "It is"


def test_files_of_one_name_are_told_apart_by_their_directories(tmp_path):
    """RULER's generators write a task of every length to a path that ends alike."""
    line, places = {"input": "x = 1\nWhich?", "outputs": ["x"]}, []
    for length, task in itertools.product(("4096", "8192"), ("vt", "cwe")):
        path = tmp_path / length / "data" / task / "validation.jsonl"
        path.parent.mkdir(parents=True)
        places.append("ruler:" + write(path, line))
    files = read_all_questions(places)
    assert [file.name for file in files] == ["vt-4096", "cwe-4096", "vt-8192", "cwe-8192"]
    assert [file.texts[0].questions[0].max_tokens for file in files[:2]] == [30, 120]
    assert [file.name for file in read_all_questions(places[:2])] == ["vt", "cwe"]
    assert [file.name for file in read_all_questions(places[:1] * 2)] == ["vt", "vt"]


@pytest.mark.parametrize(
    ("form", "fields", "message"),
    [
        ("bamboo", {"content": ["a", "b"], "answer": [1, 0]}, "only altqa, meetingqa, paperqa and private_eval"),
        ("l-eval", {"input": "a", "instructions": ["b"], "outputs": []}, "is not a valid l-eval question"),
        ("longbench", {"input": "a", "context": "b"}, "is not a valid longbench question: no field 'dataset'"),
        ("infinitebench", {"context": "a", "input": "b", "answer": None}, "an answer is neither a text nor a number"),
        (
            "infinitebench",
            {"context": "a", "input": "b", "answer": ["c"], "options": ["d", "e"]},
            "the answer 'C' is not the letter of a choice",
        ),
    ],
)
def test_a_line_that_is_not_of_its_form(tmp_path, form, fields, message):
    with pytest.raises(ConfigurationError, match=r"bad\.jsonl, line 1") as error:
        read_questions(f"{form}:" + write(tmp_path / "bad.jsonl", fields))
    assert message in str(error.value)


def test_classes_of_longbench(tmp_path):
    line = PUBLISHED["trec"][1] | {"all_classes": ["City", "Date"]}
    (text,) = read_questions(write(tmp_path / "trec.jsonl", line)).texts
    assert text.questions[0].scoring == Scoring("class", ("City",), ("City", "Date"))
    assert "Date" not in text.questions[0].ask
    with pytest.raises(ConfigurationError, match="is not a valid longbench question: an answer is none of its classes"):
        read_questions(write(tmp_path / "trec.jsonl", line | {"answers": ["Town"]}))


def test_what_models_continue_ends_with_its_line(tmp_path):
    (text,) = read_questions(write(tmp_path / "trec.jsonl", PUBLISHED["trec"][1])).texts
    assert text.questions[0].stop == ("\n",)
    assert text.questions[0].ask == "Question: x?\nType:"


# -- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "answers", "output", "want"),
    [
        ("contains", ["red", "crimson"], "It is Crimson.", 1),
        ("contains", ["red"], "It is redder.", 0),
        ("contains-all", ["12", "34"], "34 and 56", 0.5),
        ("contains", ["9"], "2.9 or 1,9 or 19", 0),
        ("contains", ["9"], "It is 9.", 1),
        ("contains", ["rich"], "Zürich", 0),
        ("contains", ["[6 15]"], "It prints [6 15].", 1),
        ("contains", ["[6 15]"], "It prints [6, 15].", 1),
        ("contains", ["[ 6. 15.]"], "array([6, 15.0])", 1),
        ("contains", ["['a' 'b']"], 'It is ["a", "b"].', 1),
        ("contains", ["[[1 2]\n [3 4]]"], "[[1, 2], [3, 4]]", 1),
        ("contains", ["[6 15]"], "[61, 5] or [6, 15, 1]", 0),
        ("contains", ["[1.5]"], "[1.55]", 0),
        ("phrase", ["The Beatles"], "by Beatles, I think", 1),
        ("phrase", ["U.S."], "The US.", 1),
        ("phrase", ["he"], "the", 0),
        ("phrase", ["The"], "nothing of the kind", 0),
        ("contains", ["5"], "It is -5.", 0),
        ("contains", ["-5"], "It is -5.", 1),
        ("contains", ["5"], "3-5", 1),
        ("contains", ["1000"], "1,000 lamps", 1),
        ("contains", ["1,000"], "1000 lamps", 1),
        ("contains", ["1000"], "1,000,000 or 21,000", 0),
        ("contains", ["段落3"], "答案是段落3", 1),
        ("contains", ["段落3"], "段落31", 0),
        ("contains", ["北京"], "我住在北京。", 1),
        ("contains", ["red"], "红red的", 1),
        ("number", ["段落3"], "段落3。", 1),
        ("equals", ["red"], " red\n", 1),
        ("equals", ["red"], "red.", 0),
        ("number", ["1,018"], "First 3, then 1018.", 1),
        ("number", ["18"], "18 of 20", 0),
        ("number", ["-2.5"], "The answer is -2.5", 1),
        ("number", ["18"], "none", 0),
        ("number", ["18"], "10-18", 1),
        ("f1", ["the red lamp"], "A red lamp!", 1),
        ("f1", ["red lamp"], "a lamp and a chair", pytest.approx(0.4)),
        ("f1", ["red", "a blue lamp"], "blue lamp", 1),
        ("f1", ["red"], "", 0),
        ("f1", ["紅燈"], "紅色", pytest.approx(0.5)),
        ("f1", ["北京"], "北京。", 1),
        ("f1", ["foo"], "`foo`", 1),
        ("f1", ["$5"], "5", 1),
        ("rouge-l", ["the café's cats sat"], "the café's cat sat", 1),
        ("rouge-l", ["北京很大"], "北京很大。", 1),
        ("rouge-l", ["the cat sat on the mat"], "the cat sat on the mat", 1),
        ("rouge-l", ["the cat sat"], "dogs", 0),
        ("similarity", ["x.run()"], "```python\nx.run()\ny = 1\n```", 1),
        ("similarity", ["x.run()"], "", 0),
    ],
)
def test_scores(kind, answers, output, want):
    assert score(Scoring(kind, tuple(answers)), output) == want


@pytest.mark.parametrize(
    ("answers", "output", "want"),
    [
        (["B"], "B) she", 1),
        (["B"], "B", 1),
        (["B"], " (B).", 1),
        (["B"], "B. A lamp", 1),
        (["B"], "BD", 0),
        (["B"], "B and D", 0),
        (["B"], "The answer is B", 1),
        (["B"], "I think it is C, not B", 0),
        (["B"], "a lamp", 1),
        (["B"], "an egg or a lamp", 0),
        (["B"], "", 0),
        (["B"], "Because of A", 0),
        (["A"], "A lamp, so B", 0),
        (["A"], "A", 1),
        (["A"], "I think it is A.", 1),
        (["B"], "B, A lamp", 1),
        (["A"], "A is correct", 1),
        (["A"], "A because B is wrong", 1),
        (["A"], "The right choice is A because", 1),
        (["B"], "A or B", 0),
        (["B", "D"], "BD) both", 1),
        (["B", "D"], "The right choices are: B and D", 1),
        (["B", "D"], "B), (D)", 1),
        (["B", "D"], "D and B", 1),
        (["B", "D"], "B, C, D", 0),
        (["B", "D"], "B", 0),
    ],
)
def test_choices(answers, output, want):
    choices = ("an egg", "a lamp", "a chair", "a cup")
    assert score(Scoring("choice", tuple(answers), choices), output) == want


@pytest.mark.parametrize(
    ("output", "want"),
    [
        ("City", 1),
        ("It is a City.", 1),
        ("Capital City", 1 / 2),
        ("Date, City", 1 / 2),
        ("Date, City, Capital City", 1 / 3),
        ("Date", 0),
        ("city", 0),
        ("nothing", 0),
    ],
)
def test_classes(output, want):
    """The right class must be the only one; a model that lists them all has not chosen."""
    scoring = Scoring("class", ("City",), ("Date", "City", "Capital City"))
    assert score(scoring, output) == pytest.approx(want)
    assert score(Scoring("class", ("Capital City",), scoring.choices), "Capital City") == 1


def test_choices_that_the_question_lists():
    assert score(Scoring("choice", ("J",)), "J") == 1
    assert score(Scoring("choice", ("B",), tuple("123456789")), "I think it is B") == 1


# -- code -----------------------------------------------------------------------------------------------------------

HEAD = 'import math\n\n\ndef helper():\n    return 1\n\n\ndef twice(x):\n    """Twice x."""\n'
TEST = "def check(candidate):\n    assert candidate(2) == 4\n\ncheck(twice)"


@pytest.mark.parametrize(
    ("output", "want"),
    [
        ("    return 2 * x\n", 1),
        ("    return 3 * x\n", 0),
        ("    return 2 * x\n\nThis is twice x, as was asked for.", 1),
        ("    y = 2 * x\n    return y\n\ndef other(:\n", 1),
        ("```python\ndef twice(x):\n    return 2 * x * helper()\n```\nDone.", 1),
        ("Here you are:\n```\nimport os\n\ndef twice(x):\n    return int(math.floor(2 * x))\n```", 1),
        ("```python\n    return 2 * x\n```", 1),
        ("    return 2 * x\n\n\ndef twice(x):\n    return x", 1),
        ("def twice(x):\n    return 2 * x\n\nThis is it.", 1),
        ("Here it is:\n\nimport os\n\n\ndef twice(x):\n    return 2 * x\n\nIt's done.", 1),
        ("```python\ndef twice(x):\n    return 2 * x", 1),
        ("```bash\npip install math-helpers-of-many-kinds\n```\n```python \ndef twice(x):\n    return 2 * x\n```", 1),
        ("", 0),
        ("    return \ud800", 0),
        ("    return chr(0)\0", 0),
    ],
)
def test_code_continues_its_head_or_repeats_it(output, want):
    assert code.run_code(Scoring("code", (), (), HEAD, TEST), output) == want


def test_code_has_no_network(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        connect = f"import socket\nsocket.create_connection({server.getsockname()}, timeout=2)"
        exec(connect, {})  # from here it works
        assert code.run_code(Scoring("code"), connect) == 0
    assert code.run_code(Scoring("code"), "import socket") == 1


def test_code_has_limits(monkeypatch):
    writes = "with open('x', 'wb') as file: file.write(bytes({}))"
    assert code.run_code(Scoring("code"), f"x = bytearray({code.BYTES})") == 0
    assert code.run_code(Scoring("code"), writes.format(code.BYTES // 100 + 1)) == 0
    assert code.run_code(Scoring("code"), writes.format(1000)) == 1
    monkeypatch.setattr(code, "SECONDS", 0.5)
    began = time.monotonic()
    assert code.run_code(Scoring("code"), "import time\ntime.sleep(60)") == 0
    assert code.run_code(Scoring("code"), "while True: pass") == 0
    assert time.monotonic() - began < 15


def test_what_code_starts_ends_with_it(tmp_path):
    """Also what has left its group of processes."""
    mark = tmp_path / "mark"
    starts = (
        f"import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(1.5); open({str(mark)!r}, 'w'); os._exit(0)"
    )
    assert code.run_code(Scoring("code"), starts) == 1
    time.sleep(2.5)
    assert not mark.exists()


def test_code_that_leaves_its_group_of_processes_ends_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(code, "SECONDS", 0.5)
    mark = tmp_path / "mark"
    leaves = f"import os, time\nos.setsid(); time.sleep(2.5); open({str(mark)!r}, 'w')"
    assert code.run_code(Scoring("code"), leaves) == 0
    time.sleep(3)
    assert not mark.exists()


@pytest.mark.parametrize(
    "end", ["raise SystemExit", "import sys; sys.exit(0)", "if __name__ == '__main__':\n    exit(0)", "quit()"]
)
def test_code_that_ends_before_its_test_has_not_passed_it(end):
    assert code.run_code(Scoring("code", test="assert False"), end) == 0


# -- which questions are asked --------------------------------------------------------------------------------------


class Words:
    """A tokenizer whose tokens are words."""

    chat_template = None

    def encode(self, text, add_special_tokens=True):
        return list(range(len(text.split())))


def plan_of(path, *sizes, **options):
    variants = [Variant("full"), *(Variant("streaming", size) for size in sizes), Variant("truncated", "1/2")]
    return QuestionPlan([read_questions(path)], variants, Prompts(Words(), chat=False), **options)


def test_questions_of_one_text_follow_each_other(tmp_path):
    lines = [
        {"text": f"text {n} " * 400, "questions": [{"question": f"{m}?", "answers": "x"} for m in range(3)]}
        for n in range(4)
    ]
    path = write(tmp_path / "mine.jsonl", *lines)
    groups = list(plan_of(path, "1/4"))
    assert [len(group) for group in groups] == [9] * 4
    assert [job.variant.policy for job in groups[0]] == ["full", "streaming", "truncated"] * 3
    assert {job.sample.prompt[:6] for job in groups[2]} == {"text 2"}
    # A few questions are the first ones about each text.
    few = plan_of(path, "1/4", samples=5)
    assert [sorted({job.seed for job in group}) for group in few] == [[0, 1], [3, 6, 9]]
    assert few.shares_texts
    assert not plan_of(path, "1/4", samples=4).shares_texts
    both = plan_of(path, "1/4", places=("with", "after"))
    assert list(both.tasks) == ["mine", "late-mine"]
    assert both.stores_texts
    later = [job for group in both for job in group if job.task.name == "late-mine"]
    assert {job.variant.policy for job in later} == {"full", "streaming"}
    assert later[0].sample.prompt == lines[0]["text"]
    assert later[0].sample.second == "0?"


@pytest.mark.parametrize("texts", [1, 5])
def test_halves_have_each_question_once(tmp_path, texts):
    lines = [
        {"text": f"text {n} " * 400, "questions": [{"question": f"{m}?", "answers": "x"} for m in range(3)]}
        for n in range(texts)
    ]
    path = write(tmp_path / "mine.jsonl", *lines)
    asked = [{job.seed for group in plan_of(path, "1/4", half=half) for job in group} for half in ("even", "odd")]
    assert asked == ([{0, 2}, {1}] if texts == 1 else [{0, 1, 2, 6, 7, 8, 12, 13, 14}, {3, 4, 5, 9, 10, 11}])
    one = write(tmp_path / "one.jsonl", {"text": "text " * 400, "question": "a?", "answers": "x"})
    with pytest.raises(ConfigurationError, match="left to ask; left out of one: its odd half has no question"):
        plan_of(one, "1/4", half="odd")


def test_what_is_left_out_is_said(tmp_path):
    path = write(
        tmp_path / "mine.jsonl",
        {"text": "short", "question": "a?", "answers": "x"},
        {"text": "long " * 2000, "question": "a?", "answers": "x"},
        {"text": "fits " * 500, "question": "a?", "answers": "x"},
        {"text": "", "question": "a?", "test": "pass"},
        {"text": "", "question": "a?", "answers": "x"},
    )
    plan = plan_of(path, "256", places=("with", "after"), longest=1000)
    notes = "\n".join(plan.notes)
    assert "left out of mine: 1 questions that take more than the model's 1,000 tokens" in notes
    assert "left out of mine: 1 questions whose answers are code; give --run-code to run it" in notes
    assert "left out of late-mine: 1 questions without a text to come after" in notes
    assert "left out of mine: streaming at 256, no smaller than" in notes
    with pytest.raises(ConfigurationError, match="nothing is left to ask"):
        plan_of(path, "256", longest=1)


def test_files_of_the_same_name(tmp_path):
    (tmp_path / "other").mkdir()
    paths = [write(tmp_path / at / "mine.jsonl", {"question": "a?", "answers": "x"}) for at in (".", "other")]
    for names in (paths, [write(tmp_path / "needle.jsonl", {"question": "a?", "answers": "x"})]):
        with pytest.raises(ConfigurationError, match="is taken by another task"):
            QuestionPlan([read_questions(path) for path in names], [Variant("full")], Prompts(Words(), chat=False))
