"""lambda-GRPO against the official code, its identities, and the three ways to count process sets."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from jaxmeth import rl
from jaxmeth.types import ConfigError

FILES = ["p3g6", "p4g4_duplicates"]
METHODS = ("pairwise", "scan", "hash")
P, G, T = 3, 4, 7
N = P * G


def losses_of(g, dtype):
    """Every stored objective as a function of the bigram table W."""
    previous = jnp.asarray(np.hstack([g["prompt_ids"][:, -1:], g["completion_ids"][:, :-1]]))
    tokens = jnp.asarray(g["completion_ids"])
    batch = rl.RolloutBatch(jnp.asarray(g["rewards"], dtype), None, tokens, jnp.asarray(g["mask"], dtype))

    def logp(w):
        return jnp.take_along_axis(jax.nn.log_softmax(w[previous]), tokens[..., None], -1)[..., 0]

    def losses(w):
        found, now = {}, logp(w)
        reference = batch._replace(logp_ref=logp(jnp.asarray(g["W_ref"], dtype)))
        for mode, aggregation in (("grpo", "seq_mean_token_mean"), ("dapo", "token_mean")):
            for kind, weight in (("lambda", rl.lambda_grpo_weight), ("plain", None)):
                for beta in (0.0, 0.04):
                    parts = {"aggregation": aggregation, "token_weight": weight, "beta": beta, "weight_kl": True}
                    found[f"{kind}_{mode}_beta{beta}"], _ = rl.make_policy_loss(**parts)(now, reference)
        return found, (found, now)

    return losses


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("file", FILES)
def test_stored_weights_losses_and_gradients(golden, file, double):
    with jax.enable_x64(double), np.load(golden / "17-lambda-grpo" / f"{file}.npz") as g:
        dtype = jnp.float64 if double else jnp.float32
        tolerance = {"rtol": 0, "atol": 1e-9 if double else 1e-5}
        losses = losses_of(g, dtype)
        grads, (found, now) = compiled(jax.jacrev(losses, has_aux=True))(jnp.asarray(g["W"], dtype))
        real = g["mask"] > 0
        np.testing.assert_allclose(now[real], g["logp"][real], **tolerance)
        for name, value in found.items():
            np.testing.assert_allclose(value, g[f"loss_{name}"], **tolerance, err_msg=name)
            np.testing.assert_allclose(grads[name], g[f"gradW_{name}"], **tolerance, err_msg=name)
            assert grads[name].any()
        weight = compiled(rl.lambda_grpo_weight, static_argnums=2)
        weight = weight(g["completion_ids"], g["mask"], int(g["num_generations"]))
        assert weight.dtype == dtype
        np.testing.assert_allclose(weight, g["weights"] * g["mask"], rtol=1e-7)
        adv = rl.adv_grpo(jnp.asarray(g["rewards"], dtype)).reshape(-1)
        np.testing.assert_allclose(adv, g["adv"], **tolerance)


# --- process sets ----------------------------------------------------------------------------------------------------


def made(seed, alphabet=2):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, T + 1, N)
    tokens = rng.integers(0, alphabet, (N, T))
    tokens[1] = tokens[0]
    lengths[1] = lengths[0] = T
    tokens[2], lengths[2] = tokens[0], 3  # a strict prefix
    return tokens.astype(np.int32), np.arange(T)[None] < lengths[:, None]


def by_definition(tokens, alive):
    size = np.zeros((N, T), int)
    for i in range(N):
        for t in range(alive[i].sum()):
            members = [
                j for j in range(i // G * G, i // G * G + G)
                if alive[j].sum() > t and (tokens[j][: t + 1] == tokens[i][: t + 1]).all()
            ]  # fmt: skip
            size[i, t] = len(members)
    return size


sizes = compiled(lambda tokens, alive: {m: rl.process_set_size(tokens, alive, G, method=m) for m in METHODS})


@pytest.mark.parametrize("seed", range(4))
def test_three_methods_and_the_definition(seed):
    tokens, alive = made(seed)
    expected = by_definition(tokens, alive)
    for method, found in sizes(jnp.asarray(tokens), jnp.asarray(alive)).items():
        np.testing.assert_array_equal(found, expected, err_msg=method)
    assert (expected > 1).any()


def test_padding_side_and_content_do_not_matter():
    tokens, alive = made(1)
    expected = by_definition(tokens, alive)
    shift = T - alive.sum(1)
    left = [np.stack([np.roll(row, s) for row, s in zip(x, shift, strict=True)]) for x in (tokens, alive, expected)]
    noise = np.where(left[1], left[0], 99)
    for method, found in sizes(jnp.asarray(noise), jnp.asarray(left[1])).items():
        np.testing.assert_array_equal(found, left[2], err_msg=method)


def test_invariants():
    tokens, alive = made(2)
    weight = compiled(partial(rl.lambda_grpo_weight, group_size=G))
    u = np.asarray(weight(jnp.asarray(tokens), jnp.asarray(alive)))
    for p in range(P):
        rows = range(p * G, p * G + G)
        prefixes = {tuple(tokens[i][: t + 1]) for i in rows for t in range(alive[i].sum())}
        np.testing.assert_allclose(u[p * G : p * G + G].sum(), len(prefixes), rtol=1e-6)
    assert ((np.diff(u, axis=1) >= 0) | ~alive[:, 1:]).all()
    assert u[alive].min() >= 1 / G
    assert not u[~alive].any()
    order = np.concatenate([p * G + np.random.default_rng(p).permutation(G) for p in range(P)])
    np.testing.assert_array_equal(weight(jnp.asarray(tokens[order]), jnp.asarray(alive[order])), u[order])
    own = tokens.copy()
    own[:, 0] = np.arange(N)
    np.testing.assert_array_equal(weight(own, alive), alive)  # exactly 1: lambda-GRPO is GRPO, bit by bit
    names = np.asarray([7, 40000], np.int32)
    np.testing.assert_array_equal(weight(jnp.asarray(names[tokens]), jnp.asarray(alive)), u)


def test_long_rollouts():
    """More tokens than are compared at once, and a number that they do not divide; parting anywhere."""
    rng = np.random.default_rng(7)
    width = 41
    tokens = np.ones((N, width), np.int32)
    for row in range(1, N):
        tokens[row, rng.integers(0, width) :] += row
    alive = np.arange(width)[None] < rng.integers(width // 2, width + 1, N)[:, None]
    found = sizes(tokens, alive)
    np.testing.assert_array_equal(found["pairwise"], found["scan"])
    np.testing.assert_array_equal(found["pairwise"], found["hash"])
    assert len(np.unique(found["pairwise"])) == G + 1


def test_edges():
    """Identical rollouts 1/G, groups of one 1, prompts never share, nothing real 0, no rows."""
    same, real = jnp.ones((N, T), jnp.int32), jnp.ones((N, T), bool)
    for method in METHODS:
        f = compiled(partial(rl.lambda_grpo_weight, method=method), static_argnums=2)
        np.testing.assert_allclose(f(same, real, G), 1 / G)
        np.testing.assert_array_equal(f(same, real, 1), 1)
        np.testing.assert_array_equal(f(same, ~real, G), 0)
        assert f(same[:0], real[:0], G).shape == (0, T)


def test_no_columns():
    tokens, alive, ids = jnp.zeros((N, 0), int), jnp.zeros((N, 0)), jnp.zeros(N, int)
    for method in METHODS:
        assert rl.process_set_size(tokens, alive, G, method=method).shape == (N, 0)
    assert rl.lambda_grpo_weight(tokens, alive, None, group_ids=ids).shape == (N, 0)
    assert rl.process_rewards(jnp.ones((P, G)), tokens, alive).shape == (N, 0)
    assert not any(rl.process_tree_stats(tokens, alive, G).values())


def test_ragged_groups():
    tokens, alive = made(3)
    keep = np.asarray([0, 1, 2, 4, 8, 9, 11])
    present = np.zeros(N, bool)
    present[keep] = True
    expected = rl.process_set_size(jnp.asarray(tokens), jnp.asarray(alive & present[:, None]), G)
    ids = jnp.asarray(np.arange(N)[keep] // G)
    found = rl.process_set_size(jnp.asarray(tokens[keep]), jnp.asarray(alive[keep]), None, group_ids=ids)
    np.testing.assert_array_equal(found, np.asarray(expected)[keep])


def test_process_reward_identity(x64):
    """Identity 4: sum a_i g(i,t) = sum over steps of |L| A g, for any g of prefix and token."""
    tokens, alive = (jnp.asarray(a) for a in made(5))
    rng = np.random.default_rng(0)
    rewards = jnp.asarray(rng.normal(size=(P, G)))
    size = np.asarray(rl.process_set_size(tokens, alive, G))
    shared = np.asarray(rl.process_rewards(rewards, tokens, alive))
    stats = rl.group_stats(rewards)
    step = (shared.reshape(P, G * T) - stats.mean[:, None]) / (stats.std[:, None] + 1e-4)
    a, step = np.asarray(rl.adv_grpo(rewards)).reshape(-1), np.asarray(step).reshape(N, T)
    table: dict = {}
    left = right = 0.0
    for i in range(N):
        for t in range(int(alive[i].sum())):
            prefix = (i // G, *np.asarray(tokens[i][: t + 1]))
            new = prefix not in table
            g = table.setdefault(prefix, rng.normal())
            left += a[i] * g
            right += size[i, t] * step[i, t] * g if new else 0
    np.testing.assert_allclose(left, right, rtol=1e-9)
    assert abs(left) > 0.1


def test_process_rewards_leave_unusable_ones_out():
    tokens, alive = jnp.zeros((2, 3), int), jnp.ones((2, 3), bool)
    found = rl.process_rewards(jnp.asarray([[jnp.nan, 2.0]]), tokens, alive)
    np.testing.assert_array_equal(found, 2)
    np.testing.assert_array_equal(rl.process_rewards(jnp.asarray([[1.0, 2.0]]), tokens, alive, jnp.zeros((1, 2))), 0)


def test_tree_statistics():
    """a b | a c | a b d: steps a, b, c, d; u = 1/3 1/2, 1/3 1, 1/3 1/2 1."""
    tokens = jnp.asarray([[5, 6, 0], [5, 7, 0], [5, 6, 8]])
    alive = jnp.asarray([[1, 1, 0], [1, 1, 0], [1, 1, 1]])
    found = rl.process_tree_stats(tokens, alive, 3)
    np.testing.assert_allclose(
        [found[k] for k in ("mean_weight", "n_steps", "mean_step_len", "frac_shared")], [4 / 7, 4, 1, 5 / 7], rtol=1e-6
    )
    whole = rl.process_tree_stats(jnp.ones((3, 4), int), jnp.ones((3, 4)), 3)
    np.testing.assert_allclose([whole["n_steps"], whole["mean_step_len"]], [1, 4], rtol=1e-6)
    nothing = rl.process_tree_stats(tokens, jnp.zeros((3, 3)), 3)
    assert not any(nothing.values())


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda t, a: rl.process_set_size(t, a, 5), "group_size"),
        (lambda t, a: rl.process_set_size(t, a, 0), "group_size"),
        (lambda t, a: rl.process_set_size(t, a, None), "group_size"),
        (lambda t, a: inspect.unwrap(rl.process_set_size)(t, a, 1.5), "group_size"),
        (lambda t, a: inspect.unwrap(rl.process_rewards)(jnp.ones(N), t, a), "rewards"),
        (lambda t, a: rl.process_set_size(t, a, G, method="tree"), "method"),
        (lambda t, a: rl.process_set_size(t, a[:, 1:], G), "alive"),
        (lambda t, a: rl.lambda_grpo_weight(t, a, None, group_ids=jnp.zeros(3, int)), "group_ids"),
        (lambda t, a: rl.process_rewards(jnp.ones((2, G)), t, a), "rewards"),
        (lambda t, a: rl.process_rewards(jnp.ones((P, G)), t, a, jnp.ones((P, 1))), "valid"),
    ],
)
def test_bad_input_names_the_field(call, field):
    with pytest.raises(ConfigError, match=f"^{field}: found"):
        call(*map(jnp.asarray, made(0)))
