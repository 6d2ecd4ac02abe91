"""KREPES: a kernel surrogate of a trained encoder, and which training samples its embedding is owed to."""
from . import saving  # gives KREPES its save and load
from .audit import KREPES
from .concepts import Concept
from .influence import landmark_norms
from .landmarks import leverage_scores, select_landmarks

__all__ = ["KREPES", "Concept", "select_landmarks", "leverage_scores", "landmark_norms"]
