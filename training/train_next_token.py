"""Trains the next-token module of the shipped model with latent attention; the model itself is frozen.

    python training/train_next_token.py --model src/snapstream/assets/task-model-mla

The module is that of DeepSeek-V3 (arXiv 2412.19437, section 2.2). From the model's hidden state at token ``i`` and from
token ``i + 1``, it predicts token ``i + 2``. It is trained on the same texts as the model (:mod:`train_task_model`),
and its weights are added to the model's file under DeepSeek's names. It shares the model's embedding and output
projection.

To draft more tokens, the module gets its own output in place of the model's hidden state. This is trained as well: half
of the loss is for a second draft token that is predicted this way.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from architectures import Deepseek
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from train_task_model import IGNORED, LEARNING_RATE, Batch, Stage, Trainee, train_stage
from transformers import DeepseekV3ForCausalLM, PreTrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

CURRICULUM = (
    *(Stage(words=words) for words in (16, 64, 500)),
    Stage(lengths=(128,), steps=400),
    Stage(lengths=(128, 256, 512), steps=300),
    Stage(lengths=(256, 512, 1024, 2048), steps=200),
    Stage(lengths=(256, 512, 1024, 2048, 4096, 8192), steps=400, decay=True),
)


class NextToken(DeepseekV3DecoderLayer):
    """A decoder layer, with a projection before it that joins a hidden state and a token, and a norm after it."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_hidden_layers)
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = DeepseekV3RMSNorm(size, epsilon), DeepseekV3RMSNorm(size, epsilon)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": DeepseekV3RMSNorm(size, epsilon)})


class NextTokenTrainee(Trainee):
    """Trains only the module."""

    def __init__(self, model: DeepseekV3ForCausalLM, architecture: Deepseek) -> None:
        super().__init__(model.requires_grad_(False).eval(), architecture)
        self.module = NextToken(model.config)
        for name, parameter in self.module.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=model.config.initializer_range)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters."""
        return list(self.module.parameters())

    def targets(self, batch: Batch) -> Tensor:
        """The tokens of answers except the first, which is never drafted because it comes from prefill."""
        before = functional.pad(batch.targets[:, :-1], (1, 0), value=IGNORED)
        return batch.targets if batch.task == "pairs" else batch.targets.where(before != IGNORED, IGNORED)

    def logits(self, batch: Batch) -> Tensor:
        """Compute the logits of draft tokens where there are targets, ``[targets, vocab]``.

        Each target is predicted in one of two ways, chosen at random. In the first, the module uses the model's hidden
        state. In the second, the model is one token further behind, and the module uses its own output instead.
        """
        with torch.no_grad():
            hidden = self.model.model(batch.ids, position_ids=batch.positions, use_cache=False).last_hidden_state
        # Row i has token i + 1 and predicts token i + 2, which is the target of position i + 1.
        tail = min(batch.targets.shape[1], batch.ids.shape[1] - 2)
        targets = self.targets(batch)[:, -tail:]  # positions left out have no context, and no targets
        certain = self._joined(batch, hidden[:, :-1])
        first = self._attend(certain, certain[:, -tail - 1 :], batch)
        ahead = self.module.shared_head["norm"](first)
        # The second draft of row i: its hidden state is the module's output for row i - 1.
        joined = self._joined(batch, ahead[:, :-1], tail)
        second = self._attend(certain, joined, batch, own=True)
        wanted = targets != IGNORED
        is_first = torch.rand(targets.shape) < 0.5
        hidden = torch.where(is_first[..., None], first[:, 1:], second)[wanted]
        return self.model.lm_head(self.module.shared_head["norm"](hidden))

    def after_step(self) -> None:
        """Balance the experts' loads."""
        self.architecture.after_step(self.module, self._last_input.detach().flatten(0, -2))

    def _joined(self, batch: Batch, hidden: Tensor, size: int = 0) -> Tensor:
        """Input of the layer, for the last ``size`` rows; 0 for all rows."""
        tokens = self.model.model.embed_tokens(batch.ids[:, 1:])[:, -size:]
        return self.module.eh_proj(torch.cat((self.module.enorm(tokens), self.module.hnorm(hidden)), -1))

    def _attend(self, certain: Tensor, x: Tensor, batch: Batch, *, own: bool = False) -> Tensor:
        """Run the last rows through the layer; with ``own``, each row attends to itself as it is in ``x``."""
        layer, size, length = self.module, x.shape[1], certain.shape[1]
        attention = layer.self_attn
        cos, sin = self.model.model.rotary_emb(certain, batch.positions[:, :-1])
        q, k, v = self.architecture.project(attention, layer.input_layernorm(certain), size, cos, sin)
        mask = torch.ones(size, length, dtype=torch.bool).tril(length - size)
        if own:
            turned = cos[:, -size:], sin[:, -size:]
            q, mine, its = self.architecture.project(attention, layer.input_layernorm(x), size, *turned)
            mask = mask.tril(length - size - 1)
            # One additional key per query: its own.
            logits = (q @ k.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
            logits = torch.cat((logits, (q * mine).sum(-1, keepdim=True)), -1) * attention.scaling
            weights = logits.softmax(-1)
            mixed = weights[..., :-1] @ v + weights[..., -1:] * its
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=attention.scaling)
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        self._last_input = layer.post_attention_layernorm(x)
        return x + layer.mlp(self._last_input)


def checkpoint_tensors(module: NextToken, layer: int) -> dict[str, Tensor]:
    """Names and tensors in the format of DeepSeek's checkpoints, with separate tensors for each expert."""
    tensors = {}
    for name, tensor in module.state_dict().items():
        if name == "mlp.experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    tensors[f"mlp.experts.{expert}.{part}.weight"] = half
        elif name == "mlp.experts.down_proj":
            tensors |= {f"mlp.experts.{expert}.down_proj.weight": each for expert, each in enumerate(tensor)}
        else:
            tensors[name] = tensor
    return {f"model.layers.{layer}.{name}": tensor.clone().contiguous() for name, tensor in tensors.items()}


def main() -> None:
    """Run the curriculum and add the module to the model."""
    parser = argparse.ArgumentParser(description="Train the next-token module of a shipped model.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model to add the module to")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True)
    model = DeepseekV3ForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model.config._experts_implementation = "eager"
    trainee = NextTokenTrainee(model, Deepseek())
    print(f"{sum(p.numel() for p in trainee.parameters())} parameters", flush=True)
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for index, stage in enumerate(CURRICULUM):
        train_stage(trainee, optimizer, stage, random.Random(f"{arguments.seed}/next/{index}"))

    weights, config = arguments.model / "model.safetensors", arguments.model / "config.json"
    tensors = load_file(weights) | checkpoint_tensors(trainee.module, model.config.num_hidden_layers)
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    settings = json.loads(config.read_text(encoding="utf-8")) | {"num_nextn_predict_layers": 1}
    config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
