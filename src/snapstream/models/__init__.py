"""Models: a Hugging Face checkpoint in, logits out. They know neither caches nor requests."""

from snapstream.models.decoder import Attend, DecoderModel
from snapstream.models.files import resolve_checkpoint
from snapstream.models.spec import SUPPORTED_ARCHITECTURES, ModelSpec
from snapstream.models.weights import load_model

__all__ = ["SUPPORTED_ARCHITECTURES", "Attend", "DecoderModel", "ModelSpec", "load_model", "resolve_checkpoint"]
