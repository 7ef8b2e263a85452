"""The libraries: one for each level of instructions, each of which has to give right results by itself."""

import itertools
import os
import shutil
import subprocess
import sys

import pytest
import torch

from snapstream.cache import EntryShape
from snapstream.kernels import cpu as kernels
from snapstream.kernels.cpu import blocks, build, library
from snapstream.kernels.cpu.program import CpuProgram
from snapstream.kernels.formats import FORMATS
from snapstream.kernels.operations import PlainProgram
from snapstream.kernels.weight import BlockWeight
from snapstream.models.weights import load_model, load_spec
from tests.blocks import random_rows
from tests.checkpoints import save_checkpoint
from tests.kernels.test_coded_attention import KINDS, SHAPES, VALID, attend, filled, random
from tests.kernels.test_program import EXACT, agree, work
from tests.products import multiply

pytestmark = pytest.mark.skipif(not library.available(), reason="no kernels, and no C++ compiler")
LEVELS = {level.name: level for level in build.LEVELS}
FORBIDDEN = {  # what an older processor does not have
    "avx2": ("zmm", "vpdpbusd", "vdpbf16ps", "tdpbf16ps"),
    "avx512": ("vpdpbusd", "vdpbf16ps", "tdpbf16ps"),
    "avx512-vnni": ("vdpbf16ps", "tdpbf16ps"),
    "avx512-bf16": ("tdpbf16ps",),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """All levels, wherever they are."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    directory = tmp_path_factory.mktemp("libraries")
    for level in build.LEVELS:
        ready = build.HERE / build.library_name(level)
        if ready.exists():
            shutil.copy(ready, directory)
    found, failed = build.build_all(directory)
    assert not failed
    return dict(zip(LEVELS, found, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_gives_right_results(built, level, monkeypatch, tmp_path):
    if LEVELS[level] not in library.supported_levels():
        pytest.skip("not on this processor")
    opened = library.open_library(built[level])
    monkeypatch.setattr(library, "load", lambda: opened)
    save_checkpoint(tmp_path, "qwen3")
    ways = [name for name in kernels.INSTRUCTIONS if kernels.has_instructions(name)]
    assert ways == list(kernels.INSTRUCTIONS[: {"amx": 3, "avx512-bf16": 2}.get(level, 1)])
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            model = load_model(tmp_path, load_spec(tmp_path), dtype, torch.device("cpu"))
            operations, mine = work(model)
            _, plain = work(model)
            CpuProgram(operations, mine).run(1, last=-1)
            PlainProgram(operations, plain).run(1, last=-1)
            agree(mine, plain, 10 * EXACT[dtype])
            query, keys = torch.randn(200, 4, 64).to(dtype), torch.randn(2, 300, 64).to(dtype)
            for name in ways if dtype == torch.bfloat16 else ways[:1]:
                got = kernels.prefill_attention(query, keys, keys, torch.tensor(100), 0.1, instructions=name)
                mask = torch.arange(300) <= 100 + torch.arange(200)[:, None]
                wide = (each.double()[None] for each in (query.transpose(0, 1), keys, keys))
                want = torch.nn.functional.scaled_dot_product_attention(
                    *wide, attn_mask=mask, scale=0.1, enable_gqa=True
                )[0].transpose(0, 1)
                torch.testing.assert_close(
                    got.double(), want, rtol=0.02, atol=0.02 if dtype == torch.bfloat16 else 1e-5
                )


PORTABLE = build.Level("portable", frozenset(), ())
"""What processors that are not x86 get."""


@pytest.fixture(scope="module", params=[*LEVELS, "portable"])
def opened(built, request, tmp_path_factory):
    """The library of a level that this processor supports."""
    if request.param == "portable":
        return library.open_library(build.build(PORTABLE, tmp_path_factory.mktemp("portable")))
    if LEVELS[request.param] not in library.supported_levels():
        pytest.skip("not on this processor")
    return library.open_library(built[request.param])


@torch.inference_mode()
def test_attention_to_codes_is_the_same_on_each_level(opened, monkeypatch):
    """Sums of products of integers are exact here, too."""
    wanted = {}
    for kind, (H, N, D, V) in itertools.product(KINDS, SHAPES[:5]):
        cache, query = filled(EntryShape(N, D, latent=False), kind), random(len(VALID), H, D, seed=3)
        wanted[kind, D, V] = cache, query, attend(cache, query, D, V)
    monkeypatch.setattr(library, "load", lambda: opened)
    for (_, D, V), (cache, query, want) in wanted.items():
        torch.testing.assert_close(attend(cache, query, D, V), want, rtol=1e-3, atol=5e-3)


def test_blocks_are_the_same_on_each_level(opened, monkeypatch):
    """Sums of products of integers are exact; what is left is the order of the others."""
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(library, "load", lambda: opened)
    for kind in FORMATS.values():
        rows, x = random_rows(kind, 37, 512, generator), torch.randn(11, 512, generator=generator)
        tiles = torch.zeros(kind.stored_shape((37, 512)), dtype=torch.uint8)
        blocks.pack(kind, rows, tiles)
        assert torch.equal(tiles, kind.pack(rows))
        weight, wide = BlockWeight(tiles, kind, 37), torch.zeros(37, 512)
        blocks.widen(weight, wide)
        assert torch.equal(wide, weight.dense(torch.float32))
        out = multiply(x, weight, many=True)
        parts = x.view(11, -1, 32)
        step = parts.abs().amax(-1, keepdim=True) / 127
        rounded = ((parts / step).round() * step).flatten(1)
        want = rounded.double() @ wide.double().T
        # A number in the middle between two may be rounded either way.
        assert (out - want).abs().mean() < 1e-4 * want.abs().mean()
        # A step and a prompt are multiplied by two functions, with the same bits.
        for rows_of in (x, x.bfloat16()):
            together = multiply(rows_of, weight, many=True, instructions=0)
            assert torch.equal(multiply(rows_of, weight, instructions=0), together)
            assert torch.equal(multiply(rows_of[3:4], weight, many=True, instructions=0), together[3:4])


@pytest.mark.parametrize("level", sorted(FORBIDDEN.keys() & LEVELS.keys()))
def test_a_level_has_no_instructions_of_a_better_one(built, level):
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    text = subprocess.run(["objdump", "-d", built[level]], check=True, capture_output=True, text=True).stdout
    for instruction in FORBIDDEN[level]:
        assert instruction not in text
    assert "fmadd" in text  # so it has looked at code


def test_a_build_that_fails_leaves_nothing_and_is_said(tmp_path, monkeypatch):
    broken = tmp_path / "compiler"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.BuildError, match="no such flag"):
        build.build(build.LEVELS[0], tmp_path / "libraries")
    assert list((tmp_path / "libraries").iterdir()) == []


def a_level():
    return library.supported_levels()[0]


@pytest.fixture
def nothing_installed(tmp_path, monkeypatch):
    """As if no library had ever been built; returns where they go."""
    monkeypatch.setattr(library, "HERE", tmp_path / "installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "installed").mkdir()
    (tmp_path / "snapstream").mkdir()
    return tmp_path


def test_a_library_that_does_not_load_is_not_the_end(built, nothing_installed, monkeypatch, caplog):
    """Such as one that was made for a newer C library."""
    name = build.library_name(a_level())
    (nothing_installed / "installed" / name).write_bytes(b"not a library")
    shutil.copy(built[a_level().name], nothing_installed / "snapstream")
    assert library.load.__wrapped__() is not None  # the one that was built before
    assert not caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", str(nothing_installed / "elsewhere"))
    monkeypatch.setenv("CXX", "no-compiler-here")
    assert library.load.__wrapped__() is None
    assert "invalid ELF header" in caplog.text or "file too short" in caplog.text
    assert "slower stock operations" in caplog.text


def test_a_lesser_level_is_better_than_none(built, nothing_installed, monkeypatch, caplog):
    levels = library.supported_levels()
    if len(levels) < 2:
        pytest.skip("this processor has one level only")
    shutil.copy(built[levels[1].name], nothing_installed / "installed")
    monkeypatch.setenv("CXX", "no-compiler-here")
    assert library.available()
    assert library.load.__wrapped__() is not None
    assert f"those for {levels[1].name} are used" in caplog.text
    assert "no C++ compiler" in caplog.text


def test_a_user_without_a_home_has_what_is_installed(built, nothing_installed, monkeypatch, caplog):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(library.Path, "home", nowhere)
    assert library.load.__wrapped__() is None
    assert "this installation has none, and there is no home directory" in caplog.text
    shutil.copy(built[a_level().name], nothing_installed / "installed")
    assert library.load.__wrapped__() is not None


def test_a_cache_that_cannot_be_written_is_said(built, nothing_installed, monkeypatch, caplog):
    (nothing_installed / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(nothing_installed / "a file"))
    assert library.load.__wrapped__() is None
    assert "Not a directory" in caplog.text


def test_what_others_have_built_stays_for_a_while(tmp_path):
    fresh, old = (tmp_path / f"libsnapstream-avx2-{letter * 16}.so" for letter in "01")
    mine = tmp_path / build.library_name(a_level())
    for path in (mine, fresh, old):
        path.touch()
    os.utime(old, (0, 0))
    os.utime(mine, (0, 0))
    build.remove_others(tmp_path, days=30)
    assert sorted(tmp_path.iterdir()) == sorted((mine, fresh))
    build.remove_others(tmp_path)
    assert list(tmp_path.iterdir()) == [mine]


def test_a_compiler_may_have_arguments(monkeypatch):
    monkeypatch.setenv("CXX", "sh -c 'a b'")
    assert build.compiler() == ["sh", "-c", "a b"]
    for wrong in ("no-compiler-here g++", "g++ '-O2", " "):
        monkeypatch.setenv("CXX", wrong)
        assert build.compiler() is None


_BUILDS = """
import sys
from pathlib import Path
from snapstream.kernels.cpu import library
library.HERE = Path(sys.argv[1])
assert library.load() is not None
"""


def copying_compiler(directory, library, seconds=0.0):
    """A compiler that takes some time to write a library that has been built before; returns its path."""
    path = directory / "compiler"
    path.write_text(f'#!/bin/sh\nsleep {seconds}\nwhile [ "$1" != -o ]; do shift; done\ncp "{library}" "$2"\n')
    path.chmod(0o755)
    return path


def test_two_processes_build_at_once(built, nothing_installed):
    compiler = copying_compiler(nothing_installed, built[a_level().name], seconds=0.3)
    environment = os.environ | {"XDG_CACHE_HOME": str(nothing_installed), "CXX": str(compiler)}
    command = [sys.executable, "-c", _BUILDS, str(nothing_installed / "installed")]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        _, said = process.communicate()
        assert process.returncode == 0, said
        assert "slower stock operations" not in said
    assert [path.name for path in (nothing_installed / "snapstream").iterdir()] == [build.library_name(a_level())]


_FALLS_BACK = """
import sys
from snapstream import LLM, SamplingParams
from snapstream.kernels.cpu import library
library.HERE = __import__("pathlib").Path(sys.argv[2])  # as if nothing had been built
llm = LLM(sys.argv[1], max_model_len=256, slots=1, report_plan=lambda _: None)
print(llm.generate([5] * 100, SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids)
print(not llm.engine.model_runner.decoder.program.draws)
"""


def test_without_kernels_plain_torch_says_the_same(request, tmp_path):
    """And how to change that; with a compiler they are built once, when they are first needed.

    The compiler has compiled them before: of two compilations in this file, one is enough.
    """
    from tests.conftest import save_tokenizer

    compilers = ["no-compiler-here"]
    if build.compiler() is not None:
        built = request.getfixturevalue("built")[a_level().name]
        compilers += [str(copying_compiler(tmp_path, built))] * 2
    save_checkpoint(tmp_path / "model", "qwen3")
    save_tokenizer(tmp_path / "model")
    said = []
    for compiler in compilers:
        environment = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": compiler}
        command = [sys.executable, "-c", _FALLS_BACK, str(tmp_path / "model"), str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append((done.stdout.splitlines(), done.stderr))
    assert said[0][0][1] == "True"
    assert "Install g++" in said[0][1]
    if build.compiler() is not None:
        assert said[1][0] == said[2][0] == [said[0][0][0], "False"]
        assert "Building the CPU kernels" in said[1][1]
        assert "Building the CPU kernels" not in said[2][1]
