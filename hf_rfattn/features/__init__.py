"""Feature maps, their random projections, and the kernels they approximate."""

from .fourier import FourierFeatures
from .kernels import KERNELS, kernel_matrix
from .learned import HedgehogFeatures, LearnedPositiveFeatures
from .maps import ConstantFeatures, EluFeatures, FeatureMap, PositiveFeatures, ReluFeatures, TanhFeatures
from .projections import draw_projection, hadamard_rotation
