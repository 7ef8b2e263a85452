"""Decode steps on several devices, by arithmetic: beside the same counted one by one, and the paper's table 5."""

import random

import pytest
import torch

from snapstream.engine.devices import HEADS, SEQUENCES, Devices
from snapstream.errors import ConfigurationError
from snapstream.models.storage import parameter_bytes
from snapstream.models.weights import load_spec
from tests.published import DEEPSEEK_R1, LLAMA_31_8B, save_config

BOTH = [SEQUENCES, HEADS]
BFLOAT16 = torch.bfloat16


def spec_of(path, config):
    path.mkdir(exist_ok=True)
    return load_spec(save_config(path, config))


@pytest.fixture
def llama(tmp_path):
    return spec_of(tmp_path / "llama", LLAMA_31_8B)


@pytest.fixture
def r1(tmp_path):
    return spec_of(tmp_path / "r1", DEEPSEEK_R1)


@pytest.mark.parametrize(("length", "cache", "full", "small"), [(128, 32, 16, 64), (64, 16, 32, 128), (32, 8, 64, 256)])
def test_batches_of_the_paper(r1, length, cache, full, small):
    """Table 5: 16 devices, each with room for one full cache of 128k tokens."""
    room = 131072 * 61 * 576 * 2
    spread = Devices(r1, BFLOAT16, 16, SEQUENCES)
    assert [spread.most_sequences(n * 1024, room) for n in (length, cache)] == [full, small]
    # Latents are on every device, so each has room for its own and nothing else.
    replicated = Devices(r1, BFLOAT16, 16, HEADS)
    assert [replicated.most_sequences(n * 1024, room) for n in (length, cache)] == [full // 16, small // 16]
    assert replicated.plan(small, cache * 1024).caches == 16 * spread.plan(small, cache * 1024).caches


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("tied", [True, False])
def test_one_device_holds_everything(tmp_path, attention, tied):
    spec = spec_of(tmp_path, LLAMA_31_8B | {"tie_word_embeddings": tied})
    plan = Devices(spec, BFLOAT16, 1, attention).plan(5, 1000)
    assert plan.weights == parameter_bytes(spec, BFLOAT16)
    assert plan.caches == plan.read_caches == 5 * 1000 * spec.kv_bytes_per_token(BFLOAT16)
    assert plan.weights - plan.read_weights == (0 if tied else 128256 * 4096 * 2)  # rows of the embedding are looked up
    assert plan.sent == 0


def test_float8_matrices_stay_so(r1, tmp_path):
    config = DEEPSEEK_R1 | {"quantization_config": None}
    wide = spec_of(tmp_path / "wide", {name: value for name, value in config.items() if value is not None})
    narrow = Devices(r1, BFLOAT16, 16, SEQUENCES).plan(16, 4096)
    assert parameter_bytes(wide, BFLOAT16) / 16 < Devices(wide, BFLOAT16, 16, SEQUENCES).plan(16, 4096).weights
    # A byte each and a scale for 128 x 128 of them, but for embeddings, routers and norms.
    assert narrow.weights == pytest.approx(671.03e9 / 16, rel=0.01)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize(("heads", "devices", "held"), [(8, 4, 2), (8, 8, 1), (8, 16, 1), (1, 4, 1)])
def test_heads_that_a_device_holds(tmp_path, attention, heads, devices, held):
    spec = spec_of(tmp_path, LLAMA_31_8B | {"num_key_value_heads": heads})
    plan = Devices(spec, BFLOAT16, devices, attention).plan(2 * devices, 100)
    entry = 32 * 2 * 128 * 2  # of one head: layers, keys and values, numbers, bytes
    want = 2 * 100 * heads * entry if attention == SEQUENCES else 2 * devices * 100 * held * entry
    assert plan.caches == want


def test_experts_that_a_batch_reads(r1):
    """As many as random choices hit, on average."""
    rng = random.Random(0)
    spread = Devices(r1, BFLOAT16, 16, SEQUENCES)
    everything = spread.plan(10**6, 16).read_weights
    expert = 3 * 7168 * 2048 * (1 + 4 / 128**2) * 58 / 16  # of one number in all layers
    for sequences in (1, 16, 64, 256):
        hit = [len({e for _ in range(sequences) for e in rng.sample(range(256), 8)}) for _ in range(200)]
        missing = (256 - sum(hit) / len(hit)) * expert
        assert everything - spread.plan(sequences, 16).read_weights == pytest.approx(missing, rel=0.02, abs=expert)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("name", ["llama", "r1"])
def test_what_a_device_sends(request, name, attention):
    """Message by message, of the first device."""
    spec, n, sequences = request.getfixturevalue(name), 4, 12
    keys, values, entry = (576, 512, 576) if name == "r1" else (128, 128, 2 * 8 * 128)
    numbers = 0
    for _ in range(spec.layers):
        for _ in range(2):  # after attention, and after the feed-forward block
            for _ in range(2 * (n - 1)):  # a ring: first sums of a part each, then the parts
                numbers += sequences * spec.hidden_size // n
        if attention == SEQUENCES:
            for sequence in range(sequences):
                if sequence % n:  # another device has its cache, and wants this one's heads
                    numbers += (spec.heads * keys + entry) // n
                else:
                    numbers += (n - 1) * spec.heads // n * values
    assert Devices(spec, BFLOAT16, n, attention).plan(sequences, 16).sent == numbers * 2


def test_what_cannot_be_divided(llama):
    with pytest.raises(ConfigurationError, match="32 query heads cannot be divided among 5 devices"):
        Devices(llama, BFLOAT16, 5, HEADS)
    with pytest.raises(ConfigurationError, match="attention is 'both'; allowed: data-parallel, tensor-parallel"):
        Devices(llama, BFLOAT16, 4, "both")
