"""What the engine takes from a checkpoint besides weights."""

import json

import pytest

from snapstream.engine.settings import load_sampling_defaults


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
    ],
)
def test_sampling_defaults(tmp_path, written, expected):
    if written is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert load_sampling_defaults(str(tmp_path)) == expected
