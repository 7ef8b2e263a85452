"""What the documents tell users to do works as written."""

import re
from pathlib import Path

from snapstream.serving.settings import Example
from tests.serving.servers import running

ROOT = Path(__file__).parents[2]


def snippets(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


def run(code, url):
    exec(compile(code.replace("http://localhost:8000", url), "snippet", "exec"), {})


def test_the_client_of_the_readme(task_llm, example, capsys):
    (code,) = [code for code in snippets("README.md") if "openai" in code]
    with running(task_llm, model_name="task-model", example=Example(**example)) as server:
        run(code, server.url)
    answer = re.search(r'end=""\)  # (.*)', code)[1]
    assert capsys.readouterr().out.endswith(answer)


def test_the_client_of_the_serving_page(task_llm, capsys):
    (code,) = [code for code in snippets("docs/serving.md") if "openai" in code]
    assert "1024" in code
    with running(task_llm, model_name="task-model") as server:
        run(code.replace("1024", "256"), server.url)
    assert capsys.readouterr().out


def test_the_serving_page_names_options_that_exist():
    from typer.main import get_command

    from snapstream.cli import app

    text = (ROOT / "docs/serving.md").read_text()
    serve = get_command(app).commands["serve"]
    options = {name for parameter in serve.params for name in (*parameter.opts, *parameter.secondary_opts)}
    mentioned = set(re.findall(r"--[a-z][a-z-]+", text))
    assert mentioned <= options
