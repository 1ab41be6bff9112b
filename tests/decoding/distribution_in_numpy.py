"""The distribution of the next token, from the definitions in SamplingParams: plain loops, independent of jaxspec's sampling."""

import numpy as np

from jaxspec.sampling_params import SamplingParams


def adjust_logits(logits: np.ndarray, text: list[int], prompt_length: int, params: SamplingParams) -> np.ndarray:
    """Penalties, logit_bias and bans, given the text before the token."""
    out, values = text[prompt_length:], np.array(logits, np.float64)
    for token in range(len(values)):
        if token in text:
            penalty = params.repetition_penalty
            values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        values[token] -= params.frequency_penalty * out.count(token)
        values[token] -= params.presence_penalty * (token in out)
        values[token] += dict(params.logit_bias).get(token, 0)
        too_early = token in params.stop_token_ids and len(out) < params.min_tokens
        not_allowed = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        if too_early or not_allowed or token in params.bad_token_ids:
            values[token] = -np.inf
    return values


def kept(probabilities: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Which tokens pass top_k, top_p and min_p, each looking at the same probabilities.

    Raises:
        AssertionError: a token is so close to a boundary that rounding decides.
    """
    passes = np.zeros(len(probabilities), bool)
    before = 0.0
    for rank, token in enumerate(np.argsort(-probabilities, kind="stable")):
        share = probabilities[token] / probabilities.max()
        assert params.top_p == 1 or abs(before - params.top_p) > 1e-5
        assert params.min_p == 0 or abs(share - params.min_p) > 1e-5 * params.min_p
        in_top_k = params.top_k <= 0 or rank < params.top_k
        passes[token] = in_top_k and (params.top_p == 1 or before < params.top_p) and share >= params.min_p
        before += probabilities[token]
    return passes


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()


def distribution(logits: np.ndarray, text: list[int], prompt_length: int, params: SamplingParams) -> np.ndarray:
    """Probabilities of the token that follows the text."""
    values = adjust_logits(logits, text, prompt_length, params)
    if params.temperature == 0:
        return np.eye(len(values))[np.argmax(values)]
    probabilities = softmax(values / params.temperature)
    probabilities[~kept(probabilities, params)] = 0
    return probabilities / probabilities.sum()


def threshold_distribution(target: np.ndarray, children: list[int], single: float, acc: float) -> np.ndarray:
    """The next token's distribution under lossy acceptance, if these children were drafted and tried in turn with one number u.

    Child i is taken if u < (p_1 + ... + p_i) / acc, or at once if p_i >= single; without one, the token is sampled from the rest.
    """
    result, tried, taken = np.zeros_like(target), 0.0, 0.0
    for child in children:
        tried += target[child]
        reached = 1.0 if target[child] >= single else max(taken, min(1.0, tried / acc))
        if target[child] > 0:
            result[child], taken = reached - taken, reached
    rest = target.copy()
    rest[children] = 0
    return result + (1 - taken) * rest / max(rest.sum(), 1e-300)
