"""Writing window rows into pages of the cache."""

from pallas_kernels.cache_write.api import cache_write as cache_write
