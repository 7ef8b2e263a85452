"""What products with weights in blocks cost: perplexity as stored, and with the same numbers widened to bfloat16.

Kernels round the rows that they multiply with blocks to 8 bits. For each file as it is, and for one file in every
format, the perplexity of a page of prose and of a page of code is measured with the blocks and with their numbers.

    python benchmarks/weights.py FILE.gguf ... --formats FILE.gguf
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from snapstream import LLM, SamplingParams
from snapstream.assets import PROSE
from snapstream.engine import engine, settings
from snapstream.kernels.formats import FORMATS, Format
from snapstream.models.families import tensor_places
from snapstream.models.layers import Matrix
from snapstream.models.spec import ModelSpec
from snapstream.models.storage import quantized_formats, with_formats

TOKENS = 2000
PAGES = {"prose": PROSE.read_text(), "code": (Path(engine.__file__)).read_text()}


def make(path: str, weights: str) -> LLM:
    options = {"max_model_len": TOKENS + 1, "slots": 1, "dtype": "bfloat16", "prefix_cache": 0}
    return LLM(path, weights=weights, report_plan=lambda _: None, **options)


def perplexities(llm: LLM) -> list[float]:
    found = []
    for page in PAGES.values():
        tokens = llm.tokenizer.encode(page)[:TOKENS]
        (output,) = llm.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert output.prompt_logprobs is not None
        found.append(math.exp(-statistics.fmean(one.logprob for one in output.prompt_logprobs if one is not None)))
    return found


def in_format(path: str, kind: Format) -> tuple[LLM, LLM]:
    """A file with all weights rounded to one format: in blocks, and as numbers."""

    def chosen(checkpoint: Path, spec: ModelSpec, weights: str) -> ModelSpec:
        return with_formats(spec, quantized_formats(tensor_places(spec), kind))

    with patch.object(settings, "with_chosen_formats", chosen):
        blocks = make(path, "auto")
    wide = make(path, "dense")
    modules = dict(blocks.engine.model_runner.prefiller.model.named_modules())
    with torch.no_grad():
        for name, module in wide.engine.model_runner.prefiller.model.named_modules():
            if isinstance(module, Matrix):
                module.parts[0].copy_(modules[name].value.dense(torch.bfloat16))
    return blocks, wide


def show(name: str, blocks: LLM, wide: LLM) -> None:
    cells: list[Any] = []
    with torch.inference_mode():
        for stored, widened in zip(perplexities(blocks), perplexities(wide), strict=True):
            cells.append(f"{widened:.3f} | {stored:.3f} | {100 * (stored / widened - 1):+.2f} %")
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--formats", help="the file to round to every format")
    arguments = parser.parse_args()
    columns = " | ".join(f"{page}, widened | as stored | difference" for page in PAGES)
    print(f"| weights | {columns} |\n|{'---|' * 7}")
    for file in arguments.files:
        blocks = make(file, "auto")
        show(f"{Path(file).stem} ({blocks.engine.plan.weight_formats})", blocks, make(file, "dense"))
        del blocks
    for kind in FORMATS.values() if arguments.formats else ():
        show(f"{Path(arguments.formats).stem} in {kind.name}", *in_format(arguments.formats, kind))


if __name__ == "__main__":
    main()
