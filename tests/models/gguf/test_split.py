"""Models of several files, as llama.cpp's tools split them: whichever part is named, all of them are read."""

import shutil

import pytest

pytest.importorskip("gguf")
import gguf

from snapstream import LLM, CheckpointError, SamplingParams
from snapstream.models.fingerprint import fingerprint
from snapstream.models.gguf.container import open_container
from snapstream.models.weights import load_spec
from tests.models.gguf import files
from tests.models.gguf.files import write


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """One model in one file and in several, by gguf's own writer."""
    write(tmp_path / "whole.gguf", "qwen2")
    with monkeypatch.context() as patch:
        patch.setattr(files, "GGUFWriter", lambda path, name: gguf.GGUFWriter(path, name, split_max_tensors=9))
        write(tmp_path / "model.gguf", "qwen2")
    found = sorted(tmp_path.glob("model-*.gguf"))
    assert len(found) == 3
    assert found[1].name == "model-00002-of-00003.gguf"
    return found


def test_any_part_is_the_whole_model(parts, tmp_path):
    whole = LLM(str(tmp_path / "whole.gguf"), max_model_len=256, slots=1, dtype="float32")
    want = whole.generate("the 1212", SamplingParams(max_tokens=8))[0].token_ids
    for part in parts:
        llm = LLM(str(part), max_model_len=256, slots=1, dtype="float32")
        assert llm.generate("the 1212", SamplingParams(max_tokens=8))[0].token_ids == want
    assert len({fingerprint(part) for part in parts}) == 1


def test_a_missing_part_is_named(parts):
    parts[1].unlink()
    for named in (parts[0], parts[2]):
        with pytest.raises(CheckpointError, match=r"one of 3 parts of a model; missing in .*: model-00002-of-00003"):
            load_spec(named)


def test_a_part_whose_name_says_nothing(parts, tmp_path):
    shutil.copy(parts[0], tmp_path / "sha256-0123")
    with pytest.raises(CheckpointError, match=r"one of 3 parts of a model; keep the names they were split into"):
        load_spec(tmp_path / "sha256-0123")


def test_parts_in_the_wrong_order_and_of_another_model(parts, tmp_path, monkeypatch):
    shutil.copy(parts[1], tmp_path / "kept")
    shutil.copy(parts[2], parts[1])
    with pytest.raises(CheckpointError, match=r"00002-of-00003.gguf is not part 2 of 3: .*; was it renamed"):
        load_spec(parts[0])
    shutil.copy(tmp_path / "kept", parts[1])
    other = tmp_path / "other"
    other.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(files, "GGUFWriter", lambda path, name: gguf.GGUFWriter(path, name, split_max_tensors=12))
        write(other / "model.gguf", "qwen2", num_hidden_layers=3)
    shutil.copy(other / "model-00002-of-00004.gguf", parts[1])
    with pytest.raises(CheckpointError, match=r"is not part 2 of 3"):
        load_spec(parts[0])


def test_a_whole_file_may_be_named_like_a_part(tmp_path):
    path = tmp_path / "model-00001-of-00002.GGUF"
    write(path, "qwen2")
    assert load_spec(path).layers == len({name.split(".")[1] for name in open_container(path).tensors if "blk" in name})


@pytest.mark.parametrize("name", ["X.GGUF", "sha256-9f3c", "model.bin"])
def test_a_file_is_known_by_its_first_bytes(tmp_path, name):
    write(tmp_path / name, "qwen2")
    assert LLM(str(tmp_path / name), max_model_len=64, slots=1).generate([5], SamplingParams(max_tokens=2))
