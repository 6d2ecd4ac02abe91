"""Self-supervised objectives: one definition of each loss, and the curvature KREPES needs of it."""
from .barlow_twins import BarlowTwins
from .base import Curvature, MomentObjective, Objective, from_config
from .peira import PEIRA, PEIRALoss

__all__ = ["PEIRA", "PEIRALoss", "BarlowTwins", "Objective", "MomentObjective", "Curvature", "from_config"]
