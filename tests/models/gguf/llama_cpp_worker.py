"""Logits and tokens of llama.cpp, for the environment that has it: ``python llama_cpp_worker.py FILE REQUEST RESULT``.

The request is JSON: token ids, or a text to tokenize. The result is a NumPy file: logits ``[T, vocab]``, or token ids.
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main():
    file, request, result = sys.argv[1:]
    wanted = json.loads(Path(request).read_text(encoding="utf-8"))
    only_tokens = isinstance(wanted, str)
    llama = llama_cpp.Llama(
        file, n_ctx=512, n_batch=512, n_threads=2, logits_all=True, vocab_only=only_tokens, verbose=False
    )
    if only_tokens:
        np.save(result, np.array(llama.tokenize(wanted.encode(), add_bos=False, special=False)))
        return
    llama.eval(wanted)
    np.save(result, np.array(llama.scores[: len(wanted)], dtype=np.float32))


main()
