"""Trains the small retrieval model that ships with the package.

    python training/train_retrieval_model.py --output src/snapstream/assets/retrieval

The model is a two-layer Llama (with attention biases) of half a million parameters.  It learns one thing: to find the
fact ``Note for falcon: amber river.`` in a long text when the text ends with ``Recall the note for falcon:``.  The
circuit for that is an *induction head*: the first layer tells every token which token precedes it, the second layer
looks for the token that is preceded by the one just read.

Why a curriculum.  The two halves of the circuit are useless without each other, so on the real task the loss stays at
"some value word" for a very long time.  With eight words of each kind in a bare list of pairs the circuit appears
within a few hundred steps, and from there it only has to be widened:

0. The biases of the first layer start with a weak preference for one or two tokens back (``start_looking_back``).
1. Bare lists of repeated pairs over a growing part of the vocabulary, 8 words of each kind to all of them.
2. Facts in filler text, 128 to 8192 tokens, one to 64 facts.  Half of the steps take the new length, the others draw
   from all lengths so far, so that short texts are not forgotten.  In half of the texts the position ids jump ahead at
   a few sentence ends, so that the whole spans up to 16384 positions.  Rotary attention sees only distances, so this
   trains far distances at the price of short texts.
3. A last stage over all lengths up to 16000 lowers the learning rate to zero.

A text is followed by up to twelve questions with their answers, and the loss covers the answers (value words, full
stop, end of sequence) of all of them.  That gives much signal per text, and teaches that a second question may follow a
first answer.  A stage ends as soon as the answers of its last steps were right often enough (both value words), or at
its step limit.

Everything is drawn from ``--seed``; one thread gives the same weights each time.  With ``--checkpoints`` the state
after each stage is kept and a restarted run goes on from the last one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from snapstream.evaluation.tasks import retrieval

FIRST_TRAINING_SEED = 2**40  # Documents with smaller seeds are never trained on.
MAX_POSITIONS = 16384
IGNORED = -100
LEARNING_RATE = 1e-3
WINDOW = 30  # Steps over which the accuracy of a stage is averaged.

IDS = {word: index for index, word in enumerate(retrieval.vocabulary())}
EOS = IDS[retrieval.EOS_TOKEN]


@dataclass(frozen=True)
class Stage:
    """One stage of the curriculum.

    Attributes:
        words: Size of the vocabulary of a bare list of pairs, or 0 for texts.
        lengths: Lengths of the texts; the last is the new one and is drawn half of the time (not if ``decay``).
        target: Accuracy at which the stage ends, at the new length.
        max_steps: Number of steps after which it ends anyway.
        decay: Whether to lower the learning rate to zero over ``max_steps`` (and take all of them).
    """

    words: int = 0
    lengths: tuple[int, ...] = ()
    target: float = 0.95
    max_steps: int = 4000
    decay: bool = False


CURRICULUM = (
    *(Stage(words=words) for words in (8, 16, 32, 64, 128, 256)),
    Stage(lengths=(128,)),
    Stage(lengths=(128, 256)),
    Stage(lengths=(128, 256, 512), target=0.97),
    Stage(lengths=(128, 256, 512, 1024), target=0.98),
    Stage(lengths=(128, 256, 512, 1024, 2048), target=0.985),
    Stage(lengths=(128, 256, 512, 1024, 2048, 4096), target=0.99, max_steps=400),
    Stage(lengths=(256, 512, 1024, 2048, 4096, 8192), target=0.99, max_steps=250),
    Stage(lengths=(256, 512, 1024, 2048, 4096, 8192, 16000), max_steps=1400, decay=True),
)


@dataclass
class Batch:
    """Token ids, position ids, and the targets of the last ``targets.shape[1]`` positions."""

    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor


def questions(rng: random.Random, facts: list[tuple[str, tuple[str, ...]]]) -> tuple[list[int], list[int]]:
    """Returns token ids and targets of questions about ``facts``, each with its answer."""
    ids, targets = [], []
    with_eos = rng.random() < 0.5  # Callers may or may not keep the end of sequence.
    for key, answer in facts:
        question = retrieval.question_words(key)
        words = [IDS[word] for word in (*question, *answer, retrieval.END)]
        ids += words
        targets += [IGNORED] * (len(question) - 1) + words[len(question) :] + [EOS]
        ids += [EOS] * with_eos
        targets += [IGNORED] * with_eos
    padding = 0 if with_eos else len(facts)  # Equal length for all rows of a batch.
    return ids + [EOS] * padding, targets + [IGNORED] * padding


def stretched(rng: random.Random, ids: list[int], tail: int) -> list[int]:
    """Returns position ids that jump ahead at up to four sentence ends, the last at the tail."""
    total = int((MAX_POSITIONS - len(ids)) * rng.random())
    cuts = sorted(rng.random() for _ in range(3))
    jumps = [total * (b - a) for a, b in zip([0.0, *cuts], [*cuts, 1.0], strict=True)]
    ends = [i + 1 for i, token in enumerate(ids[:-tail]) if token == IDS[retrieval.END]]
    places = [*(rng.choice(ends) for _ in cuts), len(ids) - tail]
    steps = [1] * len(ids)
    for place, jump in zip(places, jumps, strict=True):
        steps[place] += int(jump)
    steps[0] -= 1
    return list(itertools.accumulate(steps))


def pairs_batch(rng: random.Random, words: int) -> Batch:
    """Draws lists of pairs over the first ``words`` words of each kind.

    A list repeats up to 16 pairs in random order.  The targets are the second words of pairs that have occurred before.
    Half of the lists pair keys with first value words, the other half first with second value words: the two lookups
    that an answer takes.
    """
    rows, targets = [], []
    for index in range(16):
        kinds = (retrieval.KEYS, retrieval.ADJECTIVES, retrieval.NOUNS)[index % 2 :]
        left = rng.sample(kinds[0][:words], min(words, 16))
        right = {word: rng.choice(kinds[1][:words]) for word in left}
        row, target, seen = [], [], set()
        for word in rng.choices(left, k=40):
            row += [IDS[word], IDS[right[word]]]
            target += [IDS[right[word]] if word in seen else IGNORED, IGNORED]
            seen.add(word)
        rows.append(row)
        targets.append(target)
    ids = torch.tensor(rows)
    return Batch(ids, torch.arange(ids.shape[1]).expand_as(ids), torch.tensor(targets))


def text_batch(rng: random.Random, length: int) -> Batch:
    """Draws texts of ``length`` tokens, each followed by questions with their answers."""
    most = min(64, retrieval.max_facts(length))
    count = round(math.exp(rng.random() * math.log(most)))  # One fact as often as many.
    asked = min(count, 12)
    rows, positions, targets = [], [], []
    for _ in range(max(1, 4096 // length)):
        seed = rng.randrange(FIRST_TRAINING_SEED, 2 * FIRST_TRAINING_SEED)
        document = retrieval.make_document(length, count, seed)
        facts = [(fact.key, fact.answer) for fact in rng.sample(document.facts, asked)]
        tail, target = questions(rng, facts)
        row = [IDS[word] for word in document.words] + tail
        rows.append(row)
        targets.append(target)
        positions.append(stretched(rng, row, len(tail)) if rng.random() < 0.5 else list(range(len(row))))
    return Batch(torch.tensor(rows), torch.tensor(positions), torch.tensor(targets))


def tail_logits(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Computes the logits of the last positions only.

    The same as ``model(...).logits[:, -tail:]`` at half the cost: the last layer needs queries at these positions only.
    """
    tail = batch.targets.shape[1]
    hidden = model.model.embed_tokens(batch.ids)
    cos, sin = model.model.rotary_emb(hidden, batch.positions)
    length = batch.ids.shape[1]
    for layer in model.model.layers:
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        is_last = layer is model.model.layers[-1]
        count = tail if is_last else length
        heads = (-1, attention.head_dim)
        q = attention.q_proj(normed[:, -count:]).unflatten(-1, heads).transpose(1, 2)
        k = attention.k_proj(normed).unflatten(-1, heads).transpose(1, 2)
        v = attention.v_proj(normed).unflatten(-1, heads).transpose(1, 2)
        q, _ = apply_rotary_pos_emb(q, q, cos[:, -count:], sin[:, -count:])
        k, _ = apply_rotary_pos_emb(k, k, cos, sin)
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count) if is_last else None
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        hidden = hidden[:, -count:] + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))


def exact_matches(logits: torch.Tensor, targets: torch.Tensor, tokens: int) -> torch.Tensor:
    """Tells for each answer whether all its tokens are the most likely ones.

    Given the right tokens before, that is the same as being right under greedy decoding.
    """
    right = (logits.argmax(-1) == targets)[targets != IGNORED]
    return right.view(-1, tokens).all(-1)


def train_stage(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, stage: Stage, rng: random.Random) -> None:
    """Trains until the stage's target or step limit is reached."""
    recent: deque[float] = deque(maxlen=WINDOW)
    started = time.time()
    for step in range(stage.max_steps):
        rate = LEARNING_RATE * (0.5 * (1 + math.cos(math.pi * step / stage.max_steps)) if stage.decay else 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        length = 0
        if stage.lengths:
            is_new = rng.random() < 0.5 and not stage.decay
            length = stage.lengths[-1] if is_new else rng.choice(stage.lengths)
        batch = text_batch(rng, length) if length else pairs_batch(rng, stage.words)
        logits = tail_logits(model, batch)
        loss = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if stage.lengths and length != stage.lengths[-1] and not stage.decay:
            continue
        recent.append(exact_matches(logits, batch.targets, 1 if stage.words else 4).float().mean().item())
        accuracy = sum(recent) / len(recent)
        done = len(recent) == WINDOW and accuracy >= stage.target and not stage.decay
        if done or step % 50 == 0:
            print(f"  {step:5d} loss {loss.item():.4f} accuracy {accuracy:.3f}", flush=True)
        if done:
            break
    print(f"{stage}: {time.time() - started:.0f}s", flush=True)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, length: int, count: int, samples: int) -> float:
    """Measures exact match under greedy decoding on documents that were never trained on."""
    right = 0
    for seed in range(samples):
        document = retrieval.make_document(length, count, seed)
        fact = random.Random(seed).choice(document.facts)
        tail, target = questions(random.Random(0), [(fact.key, fact.answer)])
        ids = torch.tensor([[IDS[word] for word in document.words] + tail])
        batch = Batch(ids, torch.arange(ids.shape[1])[None], torch.tensor([target]))
        right += int(exact_matches(tail_logits(model, batch), batch.targets, 4).sum())
    return right / samples


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the word-level tokenizer: words and full stops are tokens, ``key:`` is one token."""
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=retrieval.UNK_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(retrieval.END, "isolated")]
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)  # "river ." -> "river."
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=retrieval.EOS_TOKEN,
        pad_token=retrieval.PAD_TOKEN,
        unk_token=retrieval.UNK_TOKEN,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model() -> LlamaForCausalLM:
    """Builds the untrained model."""
    config = LlamaConfig(
        vocab_size=len(IDS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attention_bias=True,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=IDS[retrieval.PAD_TOKEN],
    )
    model = LlamaForCausalLM(config)
    start_looking_back(model)
    return model


@torch.no_grad()
def start_looking_back(model: LlamaForCausalLM) -> None:
    """Gives the heads of the first layer a weak preference for one or two tokens back.

    A rotary score depends on the distance through the angle between query and key; with constant biases, a key ``c``
    and a query that is ``c`` turned back by one step, it peaks at distance one.
    """
    attention = model.model.layers[0].self_attn
    half = attention.head_dim // 2
    key = torch.zeros(half)
    key[:5] = 3.0  # The fastest of the rotations.
    attention.k_proj.bias.view(-1, 2, half)[:, 0] = key
    queries = attention.q_proj.bias.view(-1, 2, half)
    for head in range(len(queries)):
        angle = -(1 + head % 2) * model.model.rotary_emb.inv_freq
        queries[head] = torch.stack([key * angle.cos(), key * angle.sin()])


def main() -> None:
    """Runs the curriculum, evaluates the model and writes it."""
    parser = argparse.ArgumentParser(description="Train the retrieval model.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=Path, help="keep the state after each stage here")
    parser.add_argument("--samples", type=int, default=100, help="documents per evaluation cell")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for index, stage in enumerate(CURRICULUM):
        checkpoint = arguments.checkpoints and arguments.checkpoints / f"stage{index:02d}.pt"
        if checkpoint and checkpoint.exists():
            state = torch.load(checkpoint)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            continue
        train_stage(model, optimizer, stage, random.Random(f"{arguments.seed}/{index}"))
        if checkpoint:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)

    model.eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=EOS, pad_token_id=IDS[retrieval.PAD_TOKEN])
    model.save_pretrained(arguments.output)
    (arguments.output / "model.safetensors").chmod(0o644)
    build_tokenizer().save_pretrained(arguments.output)
    for length in (512, 1024, 2048, 4096, 8192, 12288, 16000):
        samples = arguments.samples if length <= 8192 else math.ceil(arguments.samples / 4)
        cells = [evaluate(model, length, count, samples) for count in (1, 8, 32)]
        print(f"| {length} | " + " | ".join(f"{cell:.1%}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
