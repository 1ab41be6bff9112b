"""How many pages the cache gets. Plain Python, no JAX.

On a GPU the programs are compiled before the cache is allocated: the compiler says how much memory they take, and while it times
its choices it needs room itself. But the number of pages is part of their shapes. So the engine plans with the pages that fit
into mem_fraction of the memory, compiles, and compares. A program's temporaries do not depend on the number of pages, so if
they fit next to that cache, as they usually do, nothing is compiled twice. Otherwise the cache shrinks and the programs are
compiled again, once.

On a CPU programs are compiled while the server runs, and mem_fraction alone decides. The system gives the cache's memory page by
page, when it is first written.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from jaxspec.host_memory import available_memory, own_memory

MARGIN = 0.03
"""Share of the memory that stays free when temporaries decide: for the inputs and results of programs, and for fragmentation."""
STEPS = 8
"""How many sizes a cache can have from one power of two to the next, where the memory available at the start decides."""

logger = logging.getLogger(__name__)


class HasTemporaries(Protocol):
    """Compiled programs."""

    def most_temporaries(self) -> tuple[int, str]:
        """Bytes of temporaries of the program that takes most, and the name of this program."""


@dataclass(frozen=True)
class CacheSize:
    """The sizes that determine how many pages an engine's cache needs."""

    page_bytes: int
    page_size: int
    """Tokens per page."""
    pages_per_sequence: int
    sequences: int
    """Requests that run together."""
    most_pages: float = math.inf
    """The number that the kernels can address."""

    def pages(self, room: int, reason: str) -> int:
        """Enough pages for every sequence at full length, or as many as fit into `room` bytes.

        Raises:
            ValueError: not even one sequence fits; `reason` says where the room went and what to do.
        """
        pages = int(min(self.sequences * self.pages_per_sequence, room // self.page_bytes, self.most_pages))
        if pages < self.pages_per_sequence:
            raise ValueError(
                f"the cache has room for {max(pages, 0) * self.page_size} tokens, but one sequence may have "
                f"{self.pages_per_sequence * self.page_size}: {reason}"
            )
        return pages


@dataclass(frozen=True)
class DeviceMemory:
    """The device's memory in bytes, and what is always in it."""

    limit: int
    """What JAX may use."""
    weights: int
    rows: int
    """The device state without the cache."""

    @classmethod
    def of_host(cls, weights: int, rows: int) -> Self:
        """A CPU's, once the weights are loaded: what is available, and what they take of it already, unless they are mapped files,
        which count as available."""
        return cls(available_memory() + min(own_memory(), weights), weights, rows)

    def fit[Programs: HasTemporaries](
        self, cache: CacheSize, mem_fraction: float, compile_for: Callable[[int], Programs]
    ) -> tuple[int, Programs]:
        """The number of pages, and the programs compiled for it. Logs the parts.

        `compile_for`: compiles for this number of pages. Raises ValueError as CacheSize.pages.
        """
        planned = self.planned_pages(cache, mem_fraction)
        programs = compile_for(planned)
        temporaries, largest = programs.most_temporaries()
        pages = self.fitting_pages(cache, planned, temporaries, largest)
        if pages < planned:
            logger.info("temporaries leave room for %d pages, not for %d: compiling again", pages, planned)
            programs = compile_for(pages)
        logger.info(
            "memory: %s, temporaries %s, cache %s in %d pages",
            self._parts, readable(temporaries), readable(pages * cache.page_bytes), pages,
        )  # fmt: skip
        return pages, programs

    def planned_pages(self, cache: CacheSize, mem_fraction: float) -> int:
        """The pages to compile for. Raises ValueError as CacheSize.pages."""
        return cache.pages(
            int(self.limit * mem_fraction) - self._taken,
            f"{self._parts}, and mem_fraction {mem_fraction:g} leaves {readable(self.limit * (1 - mem_fraction))} for temporaries; "
            f"lower {'max_running_requests' if self.rows > self.weights else 'context_length'}, or raise mem_fraction",
        )

    def steady_pages(self, cache: CacheSize, mem_fraction: float) -> int:
        """The planned pages or somewhat fewer, so that the next start, which finds a little more memory or less, asks for the same
        programs: they are kept, compiled for one number of pages. Raises ValueError as CacheSize.pages.

        In:  room for 1000 pages, of 4096 that the sequences need
        Out: 960
        """
        pages = self.planned_pages(cache, mem_fraction)
        if pages == cache.sequences * cache.pages_per_sequence:
            return pages
        step = max(1, 2 ** (pages.bit_length() - 1) // STEPS)
        return max(cache.pages_per_sequence, pages // step * step)

    def fitting_pages(self, cache: CacheSize, planned: int, temporaries: int, largest: str) -> int:
        """`planned`, or fewer pages if the temporaries of the `largest` program leave room for less.

        Raises ValueError as CacheSize.pages.
        """
        room = int(self.limit * (1 - MARGIN)) - self._taken - temporaries
        if planned * cache.page_bytes <= room:
            return planned
        return cache.pages(
            room,
            f"{self._parts}, and temporaries {readable(temporaries)} ({largest}); "
            "lower context_length, max_running_requests, prefill_chunk or the size of the tree",
        )

    @property
    def _taken(self) -> int:
        return self.weights + self.rows

    @property
    def _parts(self) -> str:
        return f"of {readable(self.limit)}, weights take {readable(self.weights)}, requests {readable(self.rows)}"


def readable(size: float) -> str:
    """Bytes in a readable unit.

    In:  24_100_000
    Out: 24.1 MB
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
