"""The lines of README.md and docs/install.md that install something, followed in fresh virtual environments."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/install.md",
    "docs/serving.md",
    "docs/evaluation.md",
    "docs/vllm.md",
    "docs/transformers.md",
)
OURS = re.compile(r"^pip install (?P<quote>[\"']?)(?P<what>(\.|snapstream)\S*?)(?P=quote)$", re.MULTILINE)
WORKS = {
    "": ["snapstream", "generate", "--prompt", "Recall the note for newt:", "--max-tokens", "2"],
    "serve": ["python", "-c", "import snapstream.serving.server"],
    "eval": ["python", "-c", "import snapstream.evaluation.harness, matplotlib, openai"],
}


def lines():
    """Every line that installs this package, by page."""
    return {page: [match["what"] for match in OURS.finditer((ROOT / page).read_text())] for page in PAGES}


def test_the_pages_install_from_the_source():
    """The name `snapstream` on the index belongs to another package, and ours is on no index."""
    found = lines()
    assert "." in found["docs/install.md"]
    assert ".[serve]" in found["docs/serving.md"]
    assert ".[eval]" in found["docs/evaluation.md"]
    assert ".[vllm]" in found["docs/vllm.md"]
    every = [what for some in found.values() for what in some]
    assert all(what == "." or re.fullmatch(r"\.\[[a-z]+\]", what) for what in every), every
    for page in ("README.md", "docs/install.md"):
        text = (ROOT / page).read_text()
        assert text.index("git clone") < min(text.find(word) % 10**6 for word in ("pip install", "make demo", "LLM("))
    assert "cannot be in one environment" in " ".join((ROOT / "docs/install.md").read_text().split())
    for path in (ROOT / "src").rglob("*.py"):
        assert "snapstream[" not in path.read_text(), path


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted(WORKS))
def test_a_fresh_environment(tmp_path, extra):
    """Each line in an environment of its own, with the versions of constraints.txt: another torch may be gigabytes."""
    wanted = f".[{extra}]" if extra else "."
    assert wanted in {what for some in lines().values() for what in some}
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    for name in ("pyproject.toml", "src"):  # as it is now, not as it was committed
        shutil.rmtree(source / name) if (source / name).is_dir() else (source / name).unlink()
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "fresh")], check=True)
    binaries = tmp_path / "fresh" / "bin"
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PATH": f"{binaries}:/usr/bin:/bin"}
    environment.pop("PYTHONPATH", None)

    def call(*command, **where):
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=900, check=False, **where
        )

    done = call(binaries / "python", "-m", "pip", "install", "--quiet", wanted, cwd=source)
    assert done.returncode == 0, done.stderr
    done = call(binaries / WORKS[extra][0], *WORKS[extra][1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Name: snapstream-llm" in call(binaries / "pip", "show", "snapstream-llm").stdout
