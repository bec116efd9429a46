"""RLER: label-free rewards from the votes of an ensemble, rollout selection, and the bias of such rewards.

Rewarding agreement with one's own majority answer rewards confident mistakes. Here K models vote together, the reward
moves between hard (majority) and soft (vote share) with their agreement, and rollouts are selected by it. Any K: models
are a leading axis of stacked arrays and parameters.

**Every formula of this file is a Reconstruction**: only abstracts and reviews of the paper could be read. They name the
roles (noise, coupling and skew of the reward; ensemble self-reward, adaptive soft interpolation, balanced selection),
not the formulas; each free choice is an argument, and its alternatives are named where it is made.

Reference: Tan et al., "Breaking the self-confirming loop: diagnosing and mitigating systemic reward bias in
self-rewarding RL", arXiv 2510.08977. One model with a hard reward is TTRL, arXiv 2504.16084.
"""

import unicodedata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from jaxmeth.rl._common import as_float, check_choice, check_number, check_shape
from jaxmeth.types import ConfigError, extremes, is_concrete, whole_number

# Equal shares and scores round differently.
_TIE = 1e-6
_NO_VARIANCE = 1e-12

Answers = Int[Array, "K n"]
Valid = Num[Array, "_ _"] | Bool[Array, "_ _"] | None
AlphaFn = Callable[[Array, Array], Any]


class Ensemble(NamedTuple):
    """Votes on one prompt, and the rewards they give; the last column of the shares is the unparseable answer.

    Attributes:
      freq: f_m(a), the share of model m's valid rollouts with answer a; 0 of none.
      fbar: f(a), their mean over the models with a valid rollout.
      majority: the answer with the largest pooled share, lowest id on ties; -1 if nothing could be parsed.
      conf: its share c.
      disagreement: generalised Jensen-Shannon divergence of the models, in [0, 1].
      alpha: weight of the hard reward.
      hard, soft, reward: 0 at invalid and unparseable rollouts.
    """

    freq: Float[Array, "K A1"]
    fbar: Float[Array, " A1"]
    majority: Int[Array, ""]
    conf: Float[Array, ""]
    disagreement: Float[Array, ""]
    alpha: Float[Array, ""]
    hard: Float[Array, "K n"]
    soft: Float[Array, "K n"]
    reward: Float[Array, "K n"]


def _check_ids(answers: Array, num_answers: Any) -> None:
    whole_number("num_answers", num_answers, 1)
    if is_concrete(answers) and answers.size:
        low, high = extremes(answers)
        if low < -1 or high >= num_answers:
            raise ConfigError(f"answers: found ids {low} to {high}, expected -1 to {num_answers - 1}")


def _check_answers(answers: Array, valid: Array | None, num_answers: Any = None) -> Array:
    """The checks that all functions on one prompt's votes share; returns validity as bool."""
    if answers.ndim != 2 or not jnp.issubdtype(answers.dtype, jnp.integer):
        found = f"{answers.dtype}{list(answers.shape)}"
        raise ConfigError(f"answers: found {found}, expected integer ids [K, n] of one prompt")
    if answers.shape[0] == 0:
        raise ConfigError("answers: found 0 models (K), expected at least 1")
    if num_answers is not None:
        _check_ids(answers, num_answers)
    if valid is None:
        return jnp.ones(answers.shape, bool)
    check_shape("valid", valid, answers.shape, "answers")
    return valid != 0


def _entropy(p: Array) -> Array:
    return -jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0).sum(-1)


def _majority(shares: Array) -> tuple[Array, Array]:
    """Answer with the largest share (the last column, unparseable, cannot win) and that share; -1 and 0 of none."""
    votes = shares[..., :-1]
    best = votes.max(-1, keepdims=True)
    winner = jnp.argmax(votes >= best - _TIE, axis=-1).astype(jnp.int32)
    share = jnp.take_along_axis(votes, winner[..., None], -1)[..., 0]
    return jnp.where(share > 0, winner, -1), share


def ensemble_reward(
    answers: Answers,
    valid: Valid,
    num_answers: int,
    *,
    gamma: float | Float[Array, ""] = 1.0,
    alpha_fn: AlphaFn | None = None,
    cross: bool = False,
) -> Ensemble:
    """Rewards of the rollouts of K models on one prompt: ``alpha hard + (1 - alpha) soft``. ``vmap`` over prompts.

    hard = 1 if the answer is the pooled majority a*, soft = the pooled share f(a) of the answer, both 0 if unparseable;
    ``alpha = clip(c^gamma (1 - D), 0, 1)`` with confidence c = f(a*) and disagreement
    ``D = [H(f) - mean_m H(f_m)] / log(K active)``, 0 with fewer than two active models. Hard where the models agree and
    are confident, as a wrong majority over-rewards by 1 when hard and by f(a) when soft. Alternatives: alpha from the
    confidence alone, a schedule in training steps, an estimate of both errors: ``alpha_fn``.

    Args:
      answers: id of each rollout's answer in 0 .. num_answers-1, or -1: unparseable, an outcome of its own that earns
        nothing and stays in the denominator of the shares.
      valid: [K, n], nonzero = this rollout exists; None = all. A model without any is not active.
      num_answers: static A >= 1.
      gamma: at least 0.
      alpha_fn: ``(confidence, disagreement) -> alpha``; 1 gives TTRL's majority reward (K = 1), 0 the frequency reward.
        Clipped to [0, 1]; NaN counts as 0.
      cross: an extension: judge model m by the mean share of the *other* active models, which removes self-votes
        (pooled where there is no other). majority, conf, disagreement and alpha stay pooled.

    Returns:
      :class:`Ensemble`. Nothing valid: all zeros and majority -1.

    Raises:
      ConfigError: answers that are not integers [K, n], no models (K = 0), num_answers not a whole number of at least
        1, ids out of range, unequal shapes, gamma negative or NaN.
    """
    ok = _check_answers(answers, valid, num_answers)
    check_number("gamma", gamma, 0)
    return _vote(answers, ok, gamma, num_answers, alpha_fn, cross)


@partial(jax.jit, static_argnames=("num_answers", "alpha_fn", "cross"))
def _vote(
    answers: Array, ok: Array, gamma: Array | float, num_answers: int, alpha_fn: AlphaFn | None, cross: bool
) -> Ensemble:
    dtype = as_float(0.0).dtype
    models = answers.shape[0]
    parsed = (answers >= 0) & (answers < num_answers)
    ids = jnp.where(parsed, answers, num_answers)
    counts = (jax.nn.one_hot(ids, num_answers + 1, dtype=dtype) * ok[..., None]).sum(1)
    n = ok.sum(1)
    active = n > 0
    num_active = active.sum()
    freq = counts / jnp.maximum(n, 1)[:, None]
    fbar = freq.sum(0) / jnp.maximum(num_active, 1)
    majority, conf = _majority(fbar)

    own = jnp.where(active, _entropy(freq), 0).sum() / jnp.maximum(num_active, 1)
    several = num_active > 1
    divergence = (_entropy(fbar) - own) / jnp.log(jnp.where(several, num_active, 2).astype(dtype))
    disagreement = jnp.where(several, jnp.clip(divergence, 0, 1), 0)
    alpha = conf**gamma * (1 - disagreement) if alpha_fn is None else alpha_fn(conf, disagreement)
    alpha = jnp.asarray(alpha, dtype)
    alpha = jnp.where(alpha > 0, jnp.minimum(alpha, 1), 0)

    judge = jnp.broadcast_to(fbar[None], freq.shape)
    if cross:
        others = num_active - active
        # Not the sum less one's own: a share of 0 must stay 0.
        summed = (freq[None] * (1 - jnp.eye(models, dtype=dtype))[..., None]).sum(1)
        mean = summed / jnp.maximum(others, 1)[:, None]
        judge = jnp.where((others > 0)[:, None], mean, judge)
    winner, _ = _majority(judge)
    earns = ok & parsed
    hard = (earns & (ids == winner[:, None])).astype(dtype)
    soft = jnp.where(earns, judge[jnp.arange(models)[:, None], ids], 0)
    return Ensemble(freq, fbar, majority, conf, disagreement, alpha, hard, soft, alpha * hard + (1 - alpha) * soft)


def select_rollouts(
    answers: Answers,
    valid: Valid,
    ens: Ensemble,
    n_sel: int,
    *,
    kappa: float | Float[Array, ""] = 1.0,
    q_min: float = 0.25,
) -> tuple[Bool[Array, "K n"], Float[Array, "K n"]]:
    """Choose n_sel of the K n rollouts of one prompt: clear reward, little disagreement, both strata present.

    score = 2|R - 1/2| - kappa d, d = twice the population standard deviation over active models of f_m(a); 1 for an
    unparseable rollout. Two strata: answer = a*, and the rest. The first gets
    ``floor(n_sel clip(c, q_min, 1 - q_min) + 1/2)`` places, as far as available, the rest the others; places that stay
    free go to the first again. Inside a stratum the highest score first, ties in round-robin order (rollout by rollout,
    each model in turn). Alternatives: a uniform sub-sample (the baseline), highest confidence, highest disagreement.

    Args:
      ens: of :func:`ensemble_reward` on the same answers.
      n_sel: static, at least 1.
      q_min: share of places kept for either stratum, in [0, 1/2].

    Returns:
      (selected, score); exactly min(n_sel, number of valid) are selected, only valid ones.

    Raises:
      ConfigError: n_sel below 1, q_min outside [0, 1/2], kappa negative or NaN, unequal shapes, no models.
    """
    ok = _check_answers(answers, valid)
    whole_number("n_sel", n_sel, 1)
    check_number("q_min", q_min, 0, 0.5)
    check_number("kappa", kappa, 0)
    check_shape("ens.reward", ens.reward, answers.shape, "answers")
    return _select(answers, ok, ens, kappa, q_min, n_sel)


@partial(jax.jit, static_argnames="n_sel")
def _select(
    answers: Array, ok: Array, ens: Ensemble, kappa: Array | float, q_min: Array | float, n_sel: int
) -> tuple[Array, Array]:
    num_answers = ens.freq.shape[1] - 1
    parsed = (answers >= 0) & (answers < num_answers)
    active = _active(ens)
    count = jnp.maximum(active.sum(), 1)
    deviation = jnp.where(active[:, None], ens.freq - ens.freq.sum(0)[None] / count, 0)
    spread = 2 * jnp.sqrt(jnp.square(deviation).sum(0) / count)
    disagreement = jnp.where(parsed, spread[jnp.where(parsed, answers, num_answers)], 0)
    score = 2 * jnp.abs(ens.reward - 0.5) - kappa * disagreement

    flat_ok, flat_score = ok.T.reshape(-1), score.T.reshape(-1)
    positive = flat_ok & (answers.T.reshape(-1) == ens.majority) & (ens.majority >= 0)
    rest = flat_ok & ~positive
    quota = jnp.floor(n_sel * jnp.clip(ens.conf, q_min, 1 - q_min) + 0.5 + _TIE).astype(jnp.int32)
    from_rest = jnp.minimum(n_sel - jnp.minimum(quota, positive.sum()), rest.sum())
    chosen = _best(positive, flat_score, n_sel - from_rest) | _best(rest, flat_score, from_rest)
    return chosen.reshape(answers.shape[::-1]).T, score


def _active(ens: Ensemble) -> Array:
    """The shares of an active model sum to 1, those of another to 0."""
    return ens.freq.sum(1) > 0.5


def _best(members: Array, score: Array, count: Array) -> Array:
    """The ``count`` members with the highest score, the earlier of those that are equal but for rounding."""
    # A step that no simple fraction lies half-way between two multiples of.
    step = 0.7310585 * (1e-6 if score.dtype == jnp.float32 else 1e-10)
    order = jnp.argsort(jnp.where(members, -jnp.round(score / step), jnp.inf), stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    return members & (rank < count)


class EnsembleRewards(NamedTuple):
    """For a batch of prompts: rewards and selection, by model [K, P, n], or pooled [P, K n]; and the votes [P, ...]."""

    rewards: Float[Array, "..."]
    selected: Bool[Array, "..."]
    ensemble: Ensemble


def rler_rewards(
    answers: Int[Array, "P K n"],
    valid: Num[Array, "_ _ _"] | Bool[Array, "_ _ _"] | None,
    num_answers: int,
    n_sel: int | None = None,
    *,
    gamma: float | Float[Array, ""] = 1.0,
    alpha_fn: AlphaFn | None = None,
    cross: bool = False,
    kappa: float | Float[Array, ""] = 1.0,
    q_min: float = 0.25,
    share_pool: bool = False,
) -> EnsembleRewards:
    """:func:`ensemble_reward` and :func:`select_rollouts` over prompts, laid out for the core.

    Put ``rewards`` into a ``RolloutBatch`` and apply ``keep_rollouts(batch, selected)``: advantages are then among the
    selected rollouts only. By model (the default) the leading axis K goes with stacked parameters under ``vmap``, each
    model on its own rollouts; ``share_pool=True`` gives all models the same [P, K n] rollouts, model-major, whose
    ``logp_old`` must be that of the model that made each of them.

    Args:
      n_sel: rollouts selected a prompt among all K n; None = every valid one.

    Raises:
      ConfigError: see the two functions.
    """
    if answers.ndim != 3:
        raise ConfigError(f"answers: found shape {answers.shape}, expected [P, K, n]")
    _check_ids(answers, num_answers)
    if valid is None:
        valid = jnp.ones(answers.shape, bool)
    check_shape("valid", valid, answers.shape, "answers")

    def one(a: Array, v: Array) -> tuple[Ensemble, Array]:
        ens = ensemble_reward(a, v, num_answers, gamma=gamma, alpha_fn=alpha_fn, cross=cross)
        if n_sel is None:
            return ens, v != 0
        return ens, select_rollouts(a, v, ens, n_sel, kappa=kappa, q_min=q_min)[0]

    ensemble, selected = jax.vmap(one)(answers, valid)
    if share_pool:
        pool = (answers.shape[0], -1)
        return EnsembleRewards(ensemble.reward.reshape(pool), selected.reshape(pool), ensemble)
    return EnsembleRewards(jnp.swapaxes(ensemble.reward, 0, 1), jnp.swapaxes(selected, 0, 1), ensemble)


class BiasMetrics(NamedTuple):
    """Bias of a label-free reward on a labelled probe; scalars.

    Attributes:
      rho_noise: over + under.
      over, under: mean of (reward - correct)+ and of (correct - reward)+.
      rho_symbias: (over - under) / (over + under) in [-1, 1], 0 without noise.
      rho_selfbias: Pearson correlation of the policy's own confidence and the reward; _true and _err among right and
        wrong rollouts only; 0 where fewer than two rollouts or a variance below 1e-12.
    """

    rho_noise: Float[Array, ""]
    over: Float[Array, ""]
    under: Float[Array, ""]
    rho_symbias: Float[Array, ""]
    rho_selfbias: Float[Array, ""]
    rho_selfbias_true: Float[Array, ""]
    rho_selfbias_err: Float[Array, ""]


def _pearson(x: Array, y: Array, among: Array) -> Array:
    n = jnp.maximum(among.sum(), 1)

    def centred(v: Array) -> tuple[Array, Array]:
        v = jnp.where(among, v, 0)
        deviation = jnp.where(among, v - (v / n).sum(), 0)
        scale = jnp.abs(deviation).max(initial=0)
        unit = deviation / jnp.where(scale > 0, scale, 1)
        return unit, scale * jnp.sqrt(jnp.square(unit).sum() / n)

    (dx, sx), (dy, sy) = centred(x), centred(y)
    varies = (among.sum() > 1) & (sx >= _NO_VARIANCE**0.5) & (sy >= _NO_VARIANCE**0.5)
    norm = jnp.sqrt(jnp.square(dx).sum() * jnp.square(dy).sum())
    return jnp.where(varies, jnp.clip((dx * dy).sum() / jnp.where(varies, norm, 1), -1, 1), 0)


def bias_metrics(
    reward: Float[Array, "*rollouts"],
    correct: Num[Array, "*other"] | Bool[Array, "*other"],
    confidence: Float[Array, "*another"],
    valid: Num[Array, "*valid"] | Bool[Array, "*valid"] | None = None,
    *,
    selfbias_kind: str = "reward",
) -> BiasMetrics:
    """Three kinds of bias of a reward, over all rollouts of a labelled probe. For measuring; labels must never reach
    the training reward, which is why they are an argument of their own.

    Args:
      reward: in [0, 1], any shape; a NaN or infinite one is left out.
      correct: the oracle's 0 or 1.
      confidence: the policy's own share f_m(a) of the rollout's answer, 0 if unparseable.
      selfbias_kind: what confidence is correlated with: ``reward``, or ``residual``, reward - correct (an alternative).

    Raises:
      ConfigError: unequal shapes, an unknown selfbias_kind.
    """
    check_choice("selfbias_kind", selfbias_kind, ("reward", "residual"))
    check_shape("correct", correct, reward.shape, "reward")
    check_shape("confidence", confidence, reward.shape, "reward")
    reward = as_float(reward)
    ok = jnp.isfinite(reward)
    if valid is not None:
        check_shape("valid", valid, reward.shape, "reward")
        ok &= valid != 0
    return _bias(reward, correct != 0, confidence, ok, selfbias_kind)


@partial(jax.jit, static_argnames="selfbias_kind")
def _bias(reward: Array, right: Array, confidence: Array, ok: Array, selfbias_kind: str) -> BiasMetrics:
    z, given, conf = right.astype(reward.dtype), jnp.where(ok, reward, 0), as_float(confidence)
    n = jnp.maximum(ok.sum(), 1)
    over = jnp.where(ok, jnp.maximum(given - z, 0) / n, 0).sum()
    under = jnp.where(ok, jnp.maximum(z - given, 0) / n, 0).sum()
    noise = over + under
    skew = jnp.where(noise > 0, (over - under) / jnp.where(noise > 0, noise, 1), 0)
    against = given if selfbias_kind == "reward" else given - z
    coupling = [_pearson(conf, against, among) for among in (ok, ok & right, ok & ~right)]
    return BiasMetrics(noise, over, under, skew, *coupling)


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(". ")


def cluster_answers(answers: Sequence[Any]) -> Int[np.ndarray, "..."]:
    """Ids of equal final answers, in order of first appearance; on the host.

    Equal = the same string after Unicode normalisation (NFKC), without case, with runs of white space as one space, and
    without white space at either end and full stops at the end ("a", "A.", "a ..." are equal).

    Args:
      answers: strings, or nested lists of them of one shape ([K, n]); None or an empty answer is unparseable.

    Returns:
      int32 of that shape, -1 where unparseable.

    Raises:
      ConfigError: something other than strings and None, lists of unequal length included.
    """
    try:
        table = np.array(answers, dtype=object)
    except ValueError as error:  # some unequal lists NumPy refuses itself
        raise ConfigError(f"answers: found {answers!r}, expected lists of one shape") from error
    for answer in table.reshape(-1):
        if not (answer is None or isinstance(answer, str)):
            raise ConfigError(f"answers: found {answer!r}, expected a string or None, in lists of one shape")
    seen: dict[str, int] = {}
    ids = [-1 if a is None or not _normal(a) else seen.setdefault(_normal(a), len(seen)) for a in table.reshape(-1)]
    return np.array(ids, np.int32).reshape(table.shape)
