"""Matrix product for at most 16 rows."""

from pallas_kernels.skinny_matmul.api import skinny_matmul as skinny_matmul
from pallas_kernels.skinny_matmul.epilogues import AddResidual as AddResidual
from pallas_kernels.skinny_matmul.epilogues import Best as Best
from pallas_kernels.skinny_matmul.epilogues import SwiGlu as SwiGlu
from pallas_kernels.skinny_matmul.epilogues import best_of_blocks as best_of_blocks
