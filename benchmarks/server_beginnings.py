"""What the prefix cache saves: the same requests to two servers, one of which has a prefix cache.

    python -m benchmarks.server_beginnings

Each request is a common prefix of random tokens and a random tail. Both servers get every request, one after the other,
so only one of them works at any time. Times are to the first text.
"""

from __future__ import annotations

import argparse
import random
import statistics

from benchmarks.server_load import serving
from benchmarks.server_sessions import timed
from snapstream.assets import TASK_MODEL
from snapstream.models.files import resolve_config
from snapstream.models.weights import load_spec

SHAPES = ((512, 128), (1024, 128), (2048, 128), (2048, 1024), (4096, 128))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TASK_MODEL.name)
    parser.add_argument("--requests", type=int, default=12, help="per row")
    arguments = parser.parse_args()
    vocabulary = load_spec(resolve_config(arguments.model)).vocab_size
    options = [arguments.model, "--budget", "512", "--slots", "1"]
    print("| beginning | tail | prompts that knew it | time to first text, without / with | range | answers equal |")
    print("|---|---|---|---|---|---|")
    with serving(*options, "--prefix-cache", "0") as plain, serving(*options) as keeping:
        for begins, tail in SHAPES:
            rng = random.Random(begins + tail)
            beginning = [rng.randrange(10, vocabulary) for _ in range(begins)]
            ratios, known, equal = [], 0, 0
            for number in range(arguments.requests + 1):
                prompt = beginning + [rng.randrange(10, vocabulary) for _ in range(tail)]
                body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
                found = {}
                for name, client in rng.sample([("plain", plain), ("keeping", keeping)], 2):
                    found[name] = timed(client, "/v1/completions", body)
                if number:  # the first is prefilled as a whole
                    ratios.append(found["plain"].seconds / found["keeping"].seconds)
                    known += found["keeping"].usage["prompt_tokens_details"]["cached_tokens"] > 0
                equal += found["plain"].text == found["keeping"].text
            print(
                f"| {begins} | {tail} | {known} of {arguments.requests} | {statistics.median(ratios):.1f}x | "
                f"{min(ratios):.1f}-{max(ratios):.1f}x | {equal} of {arguments.requests + 1} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
