"""Matrix products on CPUs, for weights stored row by row: C++ on XLA's own threads."""

from pallas_kernels.cpu import what_is_missing as what_is_missing
from pallas_kernels.row_matmul.api import row_matmul as row_matmul
from pallas_kernels.row_matmul.reference import FORMATS as FORMATS
from pallas_kernels.row_matmul.reference import unpacked as unpacked
