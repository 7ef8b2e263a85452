"""What the engine takes from a checkpoint besides weights."""

import json

import pytest
import torch

from snapstream.config import EngineConfig
from snapstream.engine.settings import Types, load_sampling_defaults, set_up
from tests.checkpoints import save_checkpoint


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (None, {}),
        ({"do_sample": False, "eos_token_id": 1}, {}),
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_p": 0.95,
                "top_k": 20,
                "eos_token_id": [1, 2],
                "max_length": 9,
            },
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"repetition_penalty": 1.05, "min_p": 0.1}, {"repetition_penalty": 1.05, "min_p": 0.1}),
        ({"temperature": None, "top_k": -1}, {"top_k": 0}),
        ([1], {}),
        ("text", {}),
    ],
)
def test_sampling_defaults(tmp_path, written, expected):
    if written is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert load_sampling_defaults(str(tmp_path)) == expected


@pytest.mark.parametrize("wrong", ['"20"', "NaN", "true", "-2", "[1]", "1e999", "{}"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_wrong_sampling_defaults_are_left_out(tmp_path, name, wrong, caplog):
    (tmp_path / "generation_config.json").write_text(f'{{"{name}": {wrong}, "eos_token_id": 3}}')
    assert load_sampling_defaults(str(tmp_path)) == {}
    assert name in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[" * 100000, "\0"])
def test_sampling_defaults_that_cannot_be_read(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    assert load_sampling_defaults(str(tmp_path)) == {}


@pytest.mark.parametrize(
    ("family", "capability", "eager"),
    [("qwen3", (8, 0), False), ("deepseek-v3", (9, 0), False), ("deepseek-v3", (10, 3), False)]
    + [("deepseek-v3", capability, True) for capability in ((8, 0), (8, 9), (12, 0))],
)
def test_experts_are_captured_where_the_host_has_no_part_in_them(
    tmp_path, monkeypatch, caplog, family, capability, eager
):
    save_checkpoint(tmp_path, family)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("snapstream.engine.settings.choose_backend", lambda *arguments, **others: None)
    setup = set_up(str(tmp_path), 64, EngineConfig(device="cuda", max_model_len=128), must_exist=False)
    assert setup.eager == eager
    assert setup.captured != eager
    assert ("not captured as graphs" in caplog.text) == eager


def test_float16_becomes_bfloat16_on_a_cpu(tmp_path, caplog):
    save_checkpoint(tmp_path, "qwen2", dtype=torch.float16)
    assert set_up(str(tmp_path), 64, EngineConfig(device="cpu")).types == Types.all(torch.bfloat16)
    assert "float16, which is slow on a CPU: it is loaded as bfloat16 (dtype float16 keeps it)" in caplog.text
    assert set_up(str(tmp_path), 64, EngineConfig(device="cpu", dtype="float16")).types == Types.all(torch.float16)
    cuda = EngineConfig(device="cuda", attention="sdpa")
    assert set_up(str(tmp_path), 64, cuda, must_exist=False).types == Types.all(torch.float16)
    save_checkpoint(tmp_path, "qwen2", dtype=torch.float32)
    assert set_up(str(tmp_path), 64, EngineConfig(device="cpu")).types == Types.all(torch.float32)
