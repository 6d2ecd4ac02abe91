"""KREPES: a kernel surrogate of a trained encoder, and which training samples its embedding is owed to."""
from .audit import KREPES
from .concepts import Concept
from . import saving
from .influence import landmark_norms
from .landmarks import leverage_scores, select_landmarks
from .saving import VERSION as FORMAT_VERSION

__all__ = ["KREPES", "Concept", "select_landmarks", "leverage_scores", "landmark_norms", "FORMAT_VERSION"]
