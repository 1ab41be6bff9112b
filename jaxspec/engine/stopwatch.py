"""Where the time goes. Plain Python, no JAX."""

from time import perf_counter


class Stopwatch:
    """Adds up the time that passes inside its `with` blocks, in seconds."""

    def __init__(self):
        self.seconds = self._started = 0.0

    def __enter__(self) -> None:
        self._started = perf_counter()

    def __exit__(self, *_exception: object) -> None:
        self.seconds += perf_counter() - self._started
