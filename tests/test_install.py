"""The lines of README.md and docs/install.md that install something, followed in fresh virtual environments."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from snapstream.kernels.cpu import build, library

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


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The source as it is now, not as it was committed, and with nothing built."""
    source = tmp_path_factory.mktemp("clone") / "source"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source / name)
    shutil.rmtree(source / "src")
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info"))
    return source


def call(environment, *command, **where):
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False, **where)


def fresh_environment(directory, *besides):
    """A virtual environment, and variables that install with the versions of constraints.txt.

    Args:
        directory: Where to make it.
        *besides: Directories with packages that it sees, behind its own.
    """
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "besides.pth").write_text("".join(f"{path}\n" for path in besides))
    binaries = directory / "bin"
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PATH": f"{binaries}:/usr/bin:/bin"}
    environment.pop("PYTHONPATH", None)
    return binaries, environment


@pytest.fixture(scope="module")
def plain(tmp_path_factory, source):
    """An environment with `pip install .`: binaries, variables, packages. The source gets the kernels it built, too.

    Other environments see them, so that torch is downloaded, and kernels are compiled, once. An extra needs all of
    these packages anyway.
    """
    fresh = tmp_path_factory.mktemp("plain") / "fresh"
    binaries, environment = fresh_environment(fresh)
    done = call(environment, binaries / "python", "-m", "pip", "install", "--quiet", ".", cwd=source)
    assert done.returncode == 0, done.stderr
    (packages,) = fresh.glob("lib/python*/site-packages")
    for kernels in (packages / "snapstream/kernels/cpu").glob("*.so"):
        shutil.copy2(kernels, source / "src/snapstream/kernels/cpu")
    return binaries, environment, packages


def works(binaries, environment, extra, directory):
    """What the installation is for."""
    done = call(environment, binaries / WORKS[extra][0], *WORKS[extra][1:], cwd=directory)
    assert done.returncode == 0, done.stderr
    assert "Name: snapstream-llm" in call(environment, binaries / "pip", "show", "snapstream-llm").stdout


@pytest.mark.slow
def test_a_fresh_environment(tmp_path, plain):
    """With the versions of constraints.txt: another torch may be gigabytes."""
    binaries, environment, _ = plain
    works(binaries, environment, "", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted(filter(None, WORKS)))
def test_an_extra(tmp_path, source, plain, extra):
    """Each in an environment of its own: what it forgets is in no other one."""
    assert f".[{extra}]" in {what for some in lines().values() for what in some}
    binaries, environment = fresh_environment(tmp_path / "fresh", plain[-1])
    done = call(environment, binaries / "python", "-m", "pip", "install", "--quiet", f".[{extra}]", cwd=source)
    assert done.returncode == 0, done.stderr
    works(binaries, environment, extra, tmp_path)


_LOADED = """
from pathlib import Path
import snapstream
assert Path(snapstream.__file__).is_relative_to(PACKAGES)
from snapstream.kernels.cpu import build, library
assert build.compiler() is None
assert library.load() is not None
assert not library.cache_directory().exists()
built = sorted(path.name for path in build.HERE.glob("*.so"))
assert built == sorted(map(build.library_name, build.LEVELS)), built
"""


@pytest.mark.slow
@pytest.mark.skipif(not library.available(), reason="no kernels for this processor")
@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_a_wheel_needs_no_compiler(tmp_path, source, plain):
    """It brings the kernels for every level of processors, and runs where there is nothing but Python."""
    fresh = tmp_path / "fresh"
    binaries, environment = fresh_environment(fresh, plain[-1])
    pip = (binaries / "python", "-m", "pip")
    done = call(environment, *pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path / "wheels", ".", cwd=source)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    assert re.fullmatch(r"snapstream_llm-[0-9.]+-py3-none-linux_\w+\.whl", wheel.name)
    done = call(environment, *pip, "install", "--quiet", "--force-reinstall", "--no-deps", str(wheel))
    assert done.returncode == 0, done.stderr
    bare = {"PATH": str(binaries), "HOME": str(tmp_path / "home"), "CXX": "no-compiler-here"}
    done = call(bare, binaries / "python", "-c", f"PACKAGES = {str(fresh)!r}\n{_LOADED}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = call(bare, binaries / "snapstream", *WORKS[""][1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stock" not in done.stderr
