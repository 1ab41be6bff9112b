"""The noise knows the seed, the position and the token, and nothing else."""

import jax.numpy as jnp
import numpy as np

from jaxspec.sampling import SamplingKind, choose, gumbel_noise


def seeds(*values: int) -> jnp.ndarray:
    return jnp.array([[value >> 32, value & 0xFFFFFFFF] for value in values], jnp.uint32)


def test_noise_depends_on_seed_and_position_only():
    seed, other = seeds(5, 5 + 2**32)
    base = gumbel_noise(seed, jnp.array(17), 50)
    assert jnp.array_equal(base, gumbel_noise(seed, jnp.array(17), 50))
    assert not jnp.array_equal(base, gumbel_noise(seed, jnp.array(18), 50))
    assert not jnp.array_equal(base, gumbel_noise(other, jnp.array(17), 50))


def test_noise_is_standard_gumbel():
    noise = np.concatenate([gumbel_noise(seeds(seed)[0], jnp.array(0), 5000) for seed in range(8)])
    assert abs(noise.mean() - 0.5772) < 0.03 and abs(noise.var() - np.pi**2 / 6) < 0.06


def test_choice_is_the_same_in_any_batch_and_for_any_number_of_nodes():
    rng = np.random.default_rng(0)
    logits, positions = jnp.asarray(rng.normal(size=(3, 4, 50)), jnp.float32), jnp.array([[7, 8, 8, 9]] * 3)
    temperature, seed = jnp.array([0.5, 0.0, 2.0]), seeds(1, 2, 3)
    chosen = choose(logits, positions, temperature, seed, SamplingKind.TEMPERATURE)
    for row in range(3):
        for node in range(4):
            alone = slice(row, row + 1), slice(node, node + 1)
            one = choose(logits[alone], positions[alone], temperature[row : row + 1], seed[row : row + 1], SamplingKind.TEMPERATURE)
            assert one[0, 0] == chosen[row, node]
    greedy = choose(logits, positions, temperature, seed, SamplingKind.GREEDY)
    assert (greedy == logits.argmax(-1)).all() and (chosen[1] == greedy[1]).all() and (chosen[2] != greedy[2]).any()
