"""Trains the small models that ship with the package on the tasks of the accuracy lab.

    python training/train_task_model.py --output src/snapstream/assets/task-model
    python training/train_task_model.py --architecture deepseek --output src/snapstream/assets/task-model-mla

The model is a two-layer Llama with attention biases, or a two-layer DeepSeek-V3. It learns to find information in a
long text: notes, numbers, values in a JSON object, chains of copies. The circuit for all of these is an *induction
head*. Heads of the first layer tell every token which tokens precede it. Heads of the second layer look for the place
that is preceded by the latest tokens.

A curriculum is needed because the two halves of the circuit are useless without each other, so on the real tasks the
loss stays on a plateau for a very long time. With eight words of each kind in a plain list of pairs, the circuit forms
within a few hundred steps, and from there it only has to be widened:

0. The biases of the first layer start with a weak preference for one to six tokens back (:mod:`architectures`).
1. Plain lists of repeated pairs over a growing part of the vocabulary.
2. Texts of all tasks, from 128 tokens to 8192. In half of the texts, the position ids jump ahead at a few sentence
   ends, so that the whole text spans up to 16384 positions. Attention with RoPE depends only on distances, so this
   trains long distances at the cost of short texts.
3. A last stage over all lengths lowers the learning rate to zero.

A text is followed by up to twelve questions with their answers, and the loss covers all answers, including their end
tokens. That gives a lot of signal per text, and teaches the model that a second question may follow the first answer,
immediately or after more filler.

Everything is drawn from ``--seed``, and a single thread makes the weights reproducible. With ``--checkpoints``, the
state after each stage is saved, and a restarted run resumes from the last one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import re
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path

import torch
from architectures import ARCHITECTURES, Deepseek, Llama
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from snapstream.evaluation.tasks import TASKS, Question
from snapstream.evaluation.tasks.words import ADJECTIVES, ANIMALS, FILLER_WORDS, NOUNS, PEOPLE, filler

MAX_POSITIONS = 16384
IGNORED = -100
LEARNING_RATE = 1e-3
WINDOW = 40  # Batches over which accuracies are averaged.
TOKENS = 4096  # Approximate number of tokens per batch.
PAD_TOKEN, EOS_TOKEN, UNK_TOKEN = "<pad>", "<eos>", "<unk>"

# Words include the space before them, ``falcon:`` is one token, and numbers are split into groups of three digits.
PATTERN = r" ?[A-Za-z]+:?|[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s"
split = re.compile(PATTERN).findall

FAMILIES = {  # Relative frequency of each task.
    "needle": 1.0,
    "multikey": 3.0,
    "multivalue": 0.5,
    "multiquery": 2.0,
    "passkey": 1.0,
    "number": 1.5,
    "kv": 4.0,
    "tracking": 3.0,
    "common-words": 0.25,
    "frequent-words": 0.5,
    "qa": 2.0,
}


def vocabulary() -> tuple[str, ...]:
    """All tokens in a fixed order, special tokens first."""
    words = [PAD_TOKEN, EOS_TOKEN, UNK_TOKEN]
    words += [f" {animal}:" for animal in ANIMALS]
    words += [f" {word}" for word in (*ANIMALS, *ADJECTIVES, *NOUNS, *PEOPLE, *FILLER_WORDS) if word.isalpha()]
    words += [f"{number:03d}" for number in range(1000)]
    for name in FAMILIES:
        for seed in range(20):
            made = TASKS[name].build(random.Random(seed), 400, count, None)
            words += split(made.text)
            words += [piece for q in made.questions for piece in split(q.ask + q.lead + q.answer)]
    return tuple(dict.fromkeys(words))


def count(text: str) -> int:
    """Number of tokens of a text."""
    return len(split(text))


VOCABULARY = vocabulary()
IDS = {word: index for index, word in enumerate(VOCABULARY)}
EOS = IDS[EOS_TOKEN]


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return [IDS[piece] for piece in split(text)]


@dataclass(frozen=True)
class Stage:
    """One stage of the curriculum.

    Attributes:
        words: Vocabulary size of a plain list of pairs, or 0 for texts.
        lengths: Lengths of the texts; the last one is new, and is drawn half of the time unless ``decay`` is set.
        target: Accuracy at which a stage of pairs ends.
        steps: Maximum number of steps.
        decay: Whether to lower the learning rate to zero over ``steps``.
        focus: A task that is drawn five times as often, because its circuit forms late.
    """

    words: int = 0
    lengths: tuple[int, ...] = ()
    target: float = 0.95
    steps: int = 4000
    decay: bool = False
    focus: str = ""


CURRICULUM = (
    *(Stage(words=words) for words in (8, 16, 32, 64, 128, 500)),
    Stage(lengths=(128,), steps=1500),
    Stage(lengths=(128, 256), steps=1000, focus="multiquery"),
    Stage(lengths=(128, 256, 512), steps=800, focus="multiquery"),
    Stage(lengths=(256, 512, 1024), steps=800),
    Stage(lengths=(256, 512, 1024, 2048), steps=500),
    Stage(lengths=(256, 512, 1024, 2048, 4096), steps=250),
    Stage(lengths=(256, 512, 1024, 2048, 4096, 8192), steps=150),
    Stage(lengths=(256, 512, 1024, 2048, 4096, 8192), steps=800, decay=True),
)


@dataclass
class Batch:
    """Token ids, position ids, the targets of the last ``targets.shape[1]`` positions, and the name of the task."""

    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    task: str


def dialogue(rng: random.Random, questions: list[Question]) -> tuple[list[int], list[int]]:
    """Token ids and targets of questions with their answers, sometimes with filler text before a question."""
    ids: list[int] = []
    targets: list[int] = []
    with_eos, with_filler = rng.random() < 0.5, rng.random() < 0.25  # Callers may or may not keep the end token.
    for index, question in enumerate(questions):
        between = "".join(filler(rng) for _ in range(rng.randint(0, 4))) if with_filler and index else ""
        given, answer = encode(between + question.ask + question.lead), encode(question.answer)
        ids += given + answer
        targets += [IGNORED] * (len(given) - 1) + answer + [EOS]
        if with_eos:
            ids.append(EOS)
            targets.append(IGNORED)
    return ids, targets


def stretched(rng: random.Random, ids: list[int], tail: int) -> list[int]:
    """Position ids that jump ahead at up to four places between sentences or pairs, the last one at the tail."""
    total = int((MAX_POSITIONS - len(ids)) * rng.random())
    cuts = sorted(rng.random() for _ in range(3))
    jumps = [total * (b - a) for a, b in zip([0.0, *cuts], [*cuts, 1.0], strict=True)]
    borders = {IDS["."], IDS['",']}
    ends = [i + 1 for i, token in enumerate(ids[:-tail]) if token in borders] or [0]
    places = [*(rng.choice(ends) for _ in cuts), len(ids) - tail]
    steps = [1] * len(ids)
    for place, jump in zip(places, jumps, strict=True):
        steps[place] += int(jump)
    steps[0] -= 1
    return list(itertools.accumulate(steps))


def pairs_batch(rng: random.Random, words: int) -> Batch:
    """Draw lists of pairs over the first ``words`` words of each kind.

    A list repeats up to 16 pairs in random order. The targets are the second words of pairs that have occurred before.
    """
    numbers = [f"{number:03d}" for number in range(1000)]
    random.Random(0).shuffle(numbers)
    keys, plain = [f" {word}:" for word in ANIMALS], [f" {word}" for word in ANIMALS]
    firsts, seconds = [f" {word}" for word in ADJECTIVES], [f" {word}" for word in NOUNS]
    # No word is on both sides, because its successor would be ambiguous.
    kinds = [(keys, firsts), (firsts, seconds), (numbers[::2], numbers[1::2]), (plain[::2], plain[1::2])]
    rows, targets = [], []
    for index in range(16):
        left_words, right_words = kinds[index % len(kinds)]
        left = rng.sample(left_words[:words], min(words, 16))
        right = {word: rng.choice(right_words[:words]) for word in left}
        row, target, seen = [], [], set()
        for word in rng.choices(left, k=40):
            row += [IDS[word], IDS[right[word]]]
            target += [IDS[right[word]] if word in seen else IGNORED, IGNORED]
            seen.add(word)
        rows.append(row)
        targets.append(target)
    ids = torch.tensor(rows)
    return Batch(ids, torch.arange(ids.shape[1]).expand_as(ids), torch.tensor(targets), "pairs")


def text_batch(rng: random.Random, task: str, length: int) -> Batch:
    """Draw texts of about ``length`` tokens of one task, each followed by questions with their answers."""
    texts, tails, targets, positions = [], [], [], []
    for _ in range(max(1, TOKENS // (length + 64))):
        made = TASKS[task].build(rng, length, count, None)
        questions = rng.sample(made.questions, min(12, len(made.questions)))
        text = encode(made.text)
        tail, target = dialogue(rng, questions)
        row = text + tail
        texts.append(text)
        tails.append(tail)
        targets.append(target)
        positions.append(stretched(rng, row, len(tail)) if rng.random() < 0.5 else list(range(len(row))))
    longest = max(len(text) + len(tail) for text, tail in zip(texts, tails, strict=True))
    window = longest - min(len(text) for text in texts)
    rows, wanted = [], []
    for text, tail, target, place in zip(texts, tails, targets, positions, strict=True):
        spare = longest - len(text) - len(tail)
        rows.append(text + tail + [EOS] * spare)
        wanted.append([IGNORED] * (window - len(target) - spare) + target + [IGNORED] * spare)
        place.extend([place[-1]] * spare)
    return Batch(torch.tensor(rows), torch.tensor(positions), torch.tensor(wanted), task)


def answer_logits(
    model: PreTrainedModel, architecture: Llama | Deepseek, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logits where there are targets, ``[targets, vocab]``, and the input of the last feed-forward block.

    The logits equal ``model(...).logits[:, -tail:][targets != IGNORED]`` at a third of the cost. The last layer needs
    queries only at the tail, and everything after its attention is needed only where there is a target.
    """
    tail = batch.targets.shape[1]
    hidden = model.model.embed_tokens(batch.ids)
    cos, sin = model.model.rotary_emb(hidden, batch.positions)
    length = batch.ids.shape[1]
    for layer in model.model.layers:
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        is_last = layer is model.model.layers[-1]
        size = tail if is_last else length
        q, k, v = architecture.project(attention, normed, size, cos, sin)
        mask = torch.ones(size, length, dtype=torch.bool).tril(length - size) if is_last else None
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=attention.scaling, enable_gqa=True
        )
        hidden = hidden[:, -size:] + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden[batch.targets != IGNORED] if is_last else hidden
        normed = layer.post_attention_layernorm(hidden)
        hidden = hidden + layer.mlp(normed)
    return model.lm_head(model.model.norm(hidden)), normed


def exact_matches(hits: torch.Tensor, targets: torch.Tensor) -> float:
    """Share of answers, i.e. runs of targets that are not ignored, whose tokens are all the most likely ones.

    Because the context is correct, this is the same as being correct under greedy decoding.
    """
    right = total = 0
    marks = torch.zeros_like(targets)
    marks[targets != IGNORED] = hits.long()
    for row, wanted in zip(marks.tolist(), (targets != IGNORED).tolist(), strict=True):
        for is_answer, run in itertools.groupby(zip(wanted, row, strict=True), key=lambda pair: pair[0]):
            if is_answer:
                total += 1
                right += all(hit for _, hit in run)
    return right / max(total, 1)


class Trainee:
    """Trains a whole model."""

    def __init__(self, model: PreTrainedModel, architecture: Llama | Deepseek) -> None:
        self.model, self.architecture = model, architecture

    def parameters(self) -> list[torch.nn.Parameter]:
        """All trained parameters."""
        return list(self.model.parameters())

    def logits(self, batch: Batch) -> torch.Tensor:
        """Compute the logits where there are targets, ``[targets, vocab]``."""
        logits, self._last_input = answer_logits(self.model, self.architecture, batch)
        return logits

    def targets(self, batch: Batch) -> torch.Tensor:
        """The training targets of a batch, ``[rows, tail]``."""
        return batch.targets

    def after_step(self) -> None:
        """Update what is not trained by gradients."""
        self.architecture.after_step(self.model.model.layers[-1], self._last_input)


def train_stage(trainee: Trainee, optimizer: torch.optim.Optimizer, stage: Stage, rng: random.Random) -> None:
    """Train until the stage's target or step limit is reached."""
    recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
    started = time.time()
    for step in range(stage.steps):
        rate = LEARNING_RATE * (0.5 * (1 + math.cos(math.pi * step / stage.steps)) if stage.decay else 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if stage.lengths:
            is_new = rng.random() < 0.5 and not stage.decay
            length = stage.lengths[-1] if is_new else rng.choice(stage.lengths)
            weights = [weight * (5 if task == stage.focus else 1) for task, weight in FAMILIES.items()]
            batch = text_batch(rng, rng.choices(list(FAMILIES), weights)[0], length)
        else:
            length, batch = 0, pairs_batch(rng, stage.words)
        logits = trainee.logits(batch)
        targets = trainee.targets(batch)
        wanted = targets[targets != IGNORED]
        loss = functional.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainee.parameters(), 1.0)
        optimizer.step()
        trainee.after_step()
        if length == (stage.lengths or (0,))[-1] or stage.decay:
            recent[batch.task].append(exact_matches(logits.argmax(-1) == wanted, targets))
        pairs = recent["pairs"]
        done = len(pairs) == WINDOW and sum(pairs) / WINDOW >= stage.target
        if done or step % 100 == 99:
            shown = {task: round(sum(values) / len(values), 2) for task, values in sorted(recent.items()) if values}
            print(f"  {step:5d} {time.time() - started:5.0f}s loss {loss.item():.3f} {shown}", flush=True)
        if done:
            break
    print(f"{stage}: {time.time() - started:.0f}s", flush=True)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the word-level tokenizer; decoding reproduces the text exactly."""
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=UNK_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        unk_token=UNK_TOKEN,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """Run the curriculum and save the model."""
    parser = argparse.ArgumentParser(description="Train the model of the accuracy lab.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--architecture", choices=sorted(ARCHITECTURES), default="llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=Path, help="directory for the state after each stage")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True)
    architecture = ARCHITECTURES[arguments.architecture]
    model = architecture.build(len(IDS), MAX_POSITIONS, EOS, IDS[PAD_TOKEN])
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(IDS)} tokens", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for index, stage in enumerate(CURRICULUM):
        checkpoint = arguments.checkpoints and arguments.checkpoints / f"stage{index:02d}.pt"
        if checkpoint and checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            continue
        train_stage(Trainee(model, architecture), optimizer, stage, random.Random(f"{arguments.seed}/{index}"))
        if checkpoint:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)

    model.eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=EOS, pad_token_id=IDS[PAD_TOKEN])
    model.save_pretrained(arguments.output)
    (arguments.output / "model.safetensors").chmod(0o644)
    build_tokenizer().save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
