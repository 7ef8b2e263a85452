"""A cache of fixed size for ``model.generate()`` of transformers. The model is not patched.

Importing this module registers the attention implementation ``snapstream`` with transformers::

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="snapstream")
    cache = SnapStreamCache(model.config, budget=4096)
    model.generate(**inputs, past_key_values=cache)
"""

from snapstream.integrations.transformers.attention import ATTENTION
from snapstream.integrations.transformers.cache import SnapStreamCache
from snapstream.integrations.transformers.layer import SnapStreamLayer

__all__ = ["ATTENTION", "SnapStreamCache", "SnapStreamLayer"]
