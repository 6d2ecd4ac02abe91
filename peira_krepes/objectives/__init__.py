"""Self-supervised objectives: one definition of each loss, and the curvature KREPES needs of it."""
from .barlow_twins import BarlowTwins
from .base import Curvature, MomentObjective, Objective, from_config
from .byol import BYOL, SimSiam
from .peira import PEIRA, PEIRALoss
from .sigreg import SIGReg
from .simclr import SimCLR
from .spectral import SpectralContrastive
from .vicreg import VICReg

__all__ = ["PEIRA", "PEIRALoss", "VICReg", "BarlowTwins", "SpectralContrastive", "SimCLR", "BYOL", "SimSiam", "SIGReg",
           "Objective", "MomentObjective", "Curvature", "from_config"]
