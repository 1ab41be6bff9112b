"""When requests are sent: at once, or at random times with a given rate, whether or not the server keeps up."""

import math

import numpy as np


def arrival_times(count: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each of `count` requests is due.

    The gaps are drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    more regular. As in `vllm bench serve`, they are then scaled so that the mean rate is exactly the one that was asked for:
    otherwise a short run would measure the luck of its draw. The first request is due at 0.

    In: 3, 4.0, 1.0, 0  Out: [0.0, 0.12, 0.5]
    """
    if math.isinf(request_rate) or count < 2:
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(shape=burstiness, size=count - 1)
    times = np.cumsum(gaps)
    scaled = times * ((count - 1) / request_rate / times[-1])
    return [0.0, *scaled.tolist()]
