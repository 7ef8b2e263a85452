"""A smaller load than `make load`, on every run: all answers equal to those alone, and nothing left over."""

import asyncio

import pytest

from benchmarks.server_load import drive
from tests.bytelevel import MERGES, save_model
from tests.engine.test_engine import make
from tests.serving.servers import idle, running, wait_until
from tests.serving.test_tools import TEMPLATE


def test_load(task_llm, capsys):
    with running(task_llm, model_name="task-model", max_queue=60) as server:
        assert asyncio.run(drive(server.url, number=40, copies=3, at_once=100, rounds=2)), capsys.readouterr().out
        wait_until(lambda: idle(server))
        table = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")][
        1:
    ]
    for row in rows:
        finished, equal, aborted, invalid, refused = map(int, row[3:8])
        assert finished == equal == 120
        assert aborted == 14
        assert invalid == 7
        assert refused > 0  # there were more than the queue takes, and all were answered in the end


@pytest.mark.parametrize("speculative", [pytest.param("off", marks=pytest.mark.slow), "lookup"])
def test_with_structured_answers_and_tools_among_them(tmp_path, capsys, speculative):
    save_model(tmp_path, MERGES, max_position_embeddings=2**15)
    llm = make(tmp_path, 256, max_model_len=20_000, slots=4, speculative=speculative, prefill_chunk=512)
    llm.chat_template = TEMPLATE
    with running(llm, max_queue=60) as server:
        done = asyncio.run(drive(server.url, number=30, copies=3, at_once=100, rounds=1, shaped=True))
        assert done, capsys.readouterr().out
        wait_until(lambda: idle(server))
