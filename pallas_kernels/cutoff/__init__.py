"""The last token that top_k, top_p and min_p keep, without sorting the vocabulary."""

from pallas_kernels.cutoff.api import Cutoff as Cutoff
from pallas_kernels.cutoff.api import cutoff as cutoff
from pallas_kernels.cutoff.bisection import ordered_bits as ordered_bits
