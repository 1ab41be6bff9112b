"""Which page of the cache belongs to whom. Plain Python, no JAX."""


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
        """Takes pages back. Raises RuntimeError if one is free already."""
        for page in pages:
            if self._is_free[page]:
                raise RuntimeError(f"page {page} is released twice; this is a bug")
            self._is_free[page] = True
        self._free.extend(pages)

    def check_idle(self) -> None:
        """Raises RuntimeError with every number if pages are missing although no request holds any."""
        if self.free != self.num_pages:
            raise RuntimeError(f"idle, but free ({self.free}) + held (0) != total ({self.num_pages}) pages; this is a bug")
