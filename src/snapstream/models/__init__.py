"""Models: from a checkpoint to the operations that compute logits. They know nothing about requests."""

from snapstream.models.decoder import Attend, DecoderModel
from snapstream.models.files import resolve_checkpoint
from snapstream.models.spec import SUPPORTED_ARCHITECTURES, ModelSpec
from snapstream.models.weights import load_model

__all__ = ["SUPPORTED_ARCHITECTURES", "Attend", "DecoderModel", "ModelSpec", "load_model", "resolve_checkpoint"]
