"""Models: from a checkpoint to the operations that compute logits. They know nothing about requests."""

from snapstream.models.decoder import DecoderModel
from snapstream.models.files import resolve_checkpoint
from snapstream.models.logits import logits_of
from snapstream.models.spec import ModelSpec
from snapstream.models.weights import load_model

__all__ = ["DecoderModel", "ModelSpec", "load_model", "logits_of", "resolve_checkpoint"]
