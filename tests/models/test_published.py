"""Published configurations: as many parameters as their models have, and what their caches take."""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from snapstream.models.storage import empty_model
from snapstream.models.weights import load_spec
from tests.published import DEEPSEEK_R1, save_config

PUBLISHED = Path(__file__).parent / "published"
DOCS = Path(__file__).parents[2] / "docs" / "models.md"
PARAMETERS = {
    "GLM-4-9B-0414": 9_400_279_040,
    "GLM-4.5-Air": 106_852_251_264,  # without its layer for multi-token prediction
    "Gemma-2-9B": 9_241_705_984,
    "Gemma-3-1B": 999_885_952,
    "Gemma-4-26B-A4B": 25_233_141_790,  # this and the next three: the part for texts
    "Gemma-4-31B": 30_697_345_340,
    "Gemma-4-E2B": 4_628_569_379,  # without what the layers that share caches have in checkpoints
    "Gemma-4-E4B": 7_463_013_418,
    "Granite-3.3-8B": 8_170_864_640,
    "Llama-3.1-8B": 8_030_261_248,
    "Mistral-Small-24B": 23_572_403_200,
    "Mixtral-8x7B": 46_702_792_704,
    "Muse-Glimmer-30B": 27_854_780_928,  # the part for texts
    "OLMo-3-7B": 7_298_011_136,
    "OLMoE-1B-7B": 6_919_161_856,
    "Phi-4-mini": 3_836_021_760,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-Next-80B-A3B": 79_674_391_296,  # without its module for multi-token prediction
    "Qwen3.5-35B-A3B": 34_660_610_688,  # the part for texts
    "Qwen3.5-4B": 4_205_751_296,
    "SmolLM3-3B": 3_075_098_624,
    "gpt-oss-20b": 20_914_757_184,
}
SHORT = ("Gemma-2-9B", "OLMoE-1B-7B")
"""Models with fewer positions than the table has."""


def spec_of(name, directory):
    if name == "DeepSeek-R1":
        return load_spec(save_config(directory, DEEPSEEK_R1))
    shutil.copy(PUBLISHED / f"{name}.json", directory / "config.json")
    return load_spec(directory)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name, tmp_path):
    spec = spec_of(name, tmp_path)
    assert spec.dtype == torch.bfloat16 or name == "Gemma-2-9B"
    assert spec.eos_token_ids == (248044,) or not name.startswith("Qwen3.5")
    model = empty_model(spec, torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def cells(spec):
    """The cells of a model: for texts of 32k and 128k tokens a full cache, one with 4,096 entries, and their ratio."""
    for length in (32768, 131072):
        if length > spec.max_position:
            yield from ("", "", "")
            continue
        sizes = spec.for_sequences_of(length).sizes(torch.bfloat16)
        full, small = (sizes.of([group.entries(each) for group in sizes.groups]) for each in (length, 4096))
        yield from (f"{math.floor(each / 2**20 + 0.5):,}" for each in (full, small))
        yield f"{full / small:.1f}x"


@pytest.mark.parametrize("name", [*(name for name in PARAMETERS if name not in SHORT), "DeepSeek-R1"])
def test_table_of_the_docs(name, tmp_path):
    (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert [cell.strip() for cell in row.split("|")][1:] == list(cells(spec_of(name, tmp_path)))
