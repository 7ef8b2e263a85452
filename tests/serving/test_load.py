"""A smaller load than `make load`, on every run: all answers equal to those alone, and nothing left over."""

import asyncio

from benchmarks.server_load import drive
from tests.serving.servers import idle, running, wait_until


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
