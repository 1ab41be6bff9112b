"""Matrix product for at most 16 rows."""

from pallas_kernels.skinny_matmul.api import skinny_matmul as skinny_matmul
from pallas_kernels.skinny_matmul.epilogues import SwiGlu as SwiGlu
