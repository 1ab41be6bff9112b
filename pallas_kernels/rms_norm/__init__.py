"""Root-mean-square norm of rows."""

from pallas_kernels.rms_norm.api import add_norm as add_norm
from pallas_kernels.rms_norm.api import norm_pair as norm_pair
from pallas_kernels.rms_norm.api import rms_norm as rms_norm
