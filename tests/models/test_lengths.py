"""How long a sequence may be: what the parameters of a model's rotation say, by the rules of vLLM."""

import json

import pytest

from snapstream import LLM, ConfigurationError
from snapstream.models.weights import load_spec
from tests.checkpoints import save_checkpoint

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("parameters", "stated", "longest"),
    [
        ({"rope_type": "default"}, 4096, 4096),
        # Qwen's own recipe, in the form of its model cards, and where the length was changed as well.
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 40960, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072, 131072),
        ({"rope_type": "yarn", "factor": 4.0}, 32768, 131072),
        ({"rope_type": "linear", "factor": 4.0}, 4096, 16384),
        ({"rope_type": "linear", "factor": 2.5}, 4096, 10240),
        # Llama 3.1 and 3.2 state the length after scaling.
        (LLAMA3 | {"original_max_position_embeddings": 8192}, 131072, 131072),
        (LLAMA3 | {"original_max_position_embeddings": 8192, "factor": 32.0}, 131072, 131072),
        # Scaling that was added to Llama 3.
        (LLAMA3 | {"original_max_position_embeddings": 8192}, 8192, 65536),
    ],
)
def test_the_longest_sequence(tmp_path, parameters, stated, longest):
    save_checkpoint(tmp_path, "qwen2" if parameters.get("rope_type") != "llama3" else "llama3-gqa")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters", None)
    config |= {"max_position_embeddings": stated, "rope_theta": 5e5}
    if parameters != {"rope_type": "default"}:
        config["rope_scaling"] = parameters
    path.write_text(json.dumps(config))
    assert load_spec(tmp_path).max_position == longest


def test_a_sequence_of_that_length_is_served(tmp_path):
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 5e5}
    save_checkpoint(tmp_path, "qwen2", max_position_embeddings=128, rope_parameters=parameters)
    llm = LLM(str(tmp_path), slots=1, max_model_len=512)
    assert llm.generate([3 + n % 90 for n in range(200)])[0].finish_reason in ("length", "stop")
    with pytest.raises(ConfigurationError, match="max_model_len is 513, but the model was made for 512 tokens"):
        LLM(str(tmp_path), slots=1, max_model_len=513)
