"""Made trajectories with a known law, for the budget experiment, its tests and its benchmark."""


def simulate(key, n, steps=24, solvable_share=0.6):
    """Signal, correct [n, T], length [n], cumulative tokens [n, T].

    Solvable ones are correct from a uniform step on, others never; every step is flipped with probability 0.08. The
    signal is a noisy sigmoid around that step, flatter for the unsolvable.
    """
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(key, 6)
    t = jnp.arange(steps)[None]
    length = jax.random.randint(keys[0], (n,), steps // 3, steps + 1)
    solvable = jax.random.bernoulli(keys[1], solvable_share, (n,))[:, None]
    first = jnp.floor(jax.random.uniform(keys[2], (n,)) * length)[:, None]
    correct = (solvable & (t >= first)) ^ jax.random.bernoulli(keys[3], 0.08, (n, steps))
    rise = jax.nn.sigmoid((t - first) / 2) * jnp.where(solvable, 1.0, 0.4)
    signal = jnp.clip(0.35 + 0.55 * rise + 0.12 * jax.random.normal(keys[4], (n, steps)), 0.0, 1.0)
    tokens = jnp.cumsum(jax.random.randint(keys[5], (n, steps), 50, 250), axis=1)
    return signal, correct, length, tokens


def grid():
    """Upper thresholds [106] on a signal in [0, 1]; those above 1 never fire."""
    import jax.numpy as jnp

    return jnp.linspace(0, 1.05, 106)


def upper_table(signal, correct, length, grid, count_exhausted=False):
    """Losses and costs [n, m] of every upper threshold."""
    from jaxmeth.risk import budget

    exits = budget.upper_exit(signal, length, grid)
    fired = budget.upper_fired(signal, exits, length, grid)
    losses = budget.upper_losses(exits, correct, length, fired, count_exhausted)
    return losses, budget.upper_cost(exits, correct, length)
