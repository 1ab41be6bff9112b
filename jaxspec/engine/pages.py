"""Which page of the cache belongs to whom. Plain Python, no JAX."""


class IntegrityError(RuntimeError):
    """Pages are lost or have two owners: a bug, after which no result can be trusted. The message carries every number."""


class PageAllocator:
    """Hands out pages 0 .. num_pages - 1 and takes them back."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = [True] * num_pages

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def used_share(self) -> float:
        return 1 - self.free / self.num_pages

    def pages_for(self, tokens: int) -> int:
        """Pages that this many tokens take."""
        return -(-tokens // self.page_size)

    def is_free(self, page: int) -> bool:
        return self._is_free[page]

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None if there are not so many free ones."""
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        for page in taken:
            self._is_free[page] = False
        return taken

    def release(self, pages: list[int]) -> None:
        """Takes pages back. Raises IntegrityError if one is free already."""
        for page in pages:
            if self._is_free[page]:
                raise IntegrityError(f"page {page} is released twice; this is a bug")
            self._is_free[page] = True
        self._free.extend(pages)
