"""Judge confidence: learn when to trust a judge, and accept its verdicts with a guaranteed agreement with people.

A judge compares two answers under several prompt variants ("views": simulated annotators with different examples).
A small network turns the views into a confidence whose ORDER should separate agreement with the human from
disagreement; fixed-sequence testing then finds the threshold above which the disagreement rate is at most alpha with
probability ``1 - delta``; the rest is escalated, to a stronger judge (a cascade) or to a person.

Reference: "Margin-Adaptive Confidence Ranking for Reliable LLM Judgement", arXiv 2605.15416, on top of J. Jung et al.,
"Trust or Escalate: LLM Judges with Provable Guarantees for Human Agreement" (2025) and its code. Equations of the first
come from a reading note; what neither says is marked Reconstruction.
"""

import dataclasses
import itertools
import warnings
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key, Num

from jaxmeth.risk.selective import Selective as Selective
from jaxmeth.risk.selective import Threshold as Threshold
from jaxmeth.risk.selective import cascade_apply as cascade_apply
from jaxmeth.risk.selective import cascade_calibrate as cascade_calibrate
from jaxmeth.risk.selective import fixed_sequence_test as fixed_sequence_test
from jaxmeth.risk.selective import selective as selective
from jaxmeth.types import ConfigError, Params, is_concrete
from jaxmeth.uncertainty import ranking
from jaxmeth.uncertainty.ranking import GAMMA_GRID as GAMMA_GRID
from jaxmeth.uncertainty.ranking import Complexity as Complexity
from jaxmeth.uncertainty.ranking import Estimator as Estimator
from jaxmeth.uncertainty.ranking import adaptive_gamma as adaptive_gamma
from jaxmeth.uncertainty.ranking import auroc as auroc
from jaxmeth.uncertainty.ranking import complexity_proxy as complexity_proxy
from jaxmeth.uncertainty.ranking import confidence as confidence
from jaxmeth.uncertainty.ranking import init_estimator as init_estimator
from jaxmeth.uncertainty.ranking import margin_objective as margin_objective
from jaxmeth.uncertainty.ranking import monotonicity_violation as monotonicity_violation
from jaxmeth.uncertainty.ranking import pac_bayes_complexity as pac_bayes_complexity
from jaxmeth.uncertainty.ranking import rank_loss as rank_loss
from jaxmeth.uncertainty.ranking import sample_pairs as sample_pairs

# --- simulated annotators and features -------------------------------------------------------------------------------


def shot_subsets(shots: int, nested: bool = True) -> list[tuple[int, ...]]:
    """Which of an annotator's K examples each view shows: nested prefixes 1..K, or all ``2^K - 1`` non-empty subsets.

    Both readings of the paper: for N annotators N K views (25 for 5 and 5) or ``N (2^K - 1)`` (155).

    Raises:
      ConfigError: shots < 1.
    """
    if shots < 1:
        raise ConfigError(f"shots: found {shots}, expected at least 1 example")
    if nested:
        return [tuple(range(k)) for k in range(1, shots + 1)]
    return [subset for k in range(1, shots + 1) for subset in itertools.combinations(range(shots), k)]


def verdict_probs(shown: Float[Array, "*b 2"], swapped: Float[Array, "*b 2"]) -> Float[Array, "*b 2"]:
    """P(answer 1 better), P(answer 2 better) from the logits of the two verdict tokens in both presentation orders.

    Args:
      shown: logits of "the first is better", "the second is better" with answer 1 shown first.
      swapped: the same with answer 2 shown first. Each order is normalised over the two tokens, then they are averaged.
    """
    dtype = jnp.result_type(jnp.float32, shown.dtype)
    first = jax.nn.softmax(shown.astype(dtype), axis=-1)
    second = jax.nn.softmax(swapped.astype(dtype), axis=-1)
    return 0.5 * (first + jnp.flip(second, axis=-1))


def _normalised(probs: Float[Array, "n T 2"]) -> tuple[Array, Array]:
    """Views that sum to one, and the mean over those present (a half where none is)."""
    probs = probs.astype(jnp.result_type(jnp.float32, probs.dtype))
    total = probs.sum(-1, keepdims=True)
    present = jnp.isfinite(total) & (total > 0)
    views = jnp.where(present, probs, 0.0) / jnp.where(present, total, 1.0)
    count = present.sum(1)
    mean = jnp.where(count > 0, views.sum(1) / jnp.maximum(count, 1), 0.5)
    return jnp.where(present, views, mean[:, None]), mean


def aggregate_annotators(probs: Float[Array, "n T 2"]) -> tuple[Float[Array, " n"], Int[Array, " n"]]:
    """Heuristic confidence of simulated annotators: the larger mean verdict probability, and its label (0 or 1).

    Each view is normalised over the two verdicts. A missing view (NaN, or both 0) is left out of the mean; an item
    without any view gets confidence one half. One view is the predictive probability.

    Reference: Jung et al. (2025), section 2.2.
    """
    _, mean = _normalised(probs)
    return mean.max(-1), jnp.argmax(mean, axis=-1).astype(jnp.int32)


def features(probs: Float[Array, "n T 2"], orient: bool = True) -> tuple[Float[Array, "n T"], Int[Array, " n"]]:
    """The views themselves as features, without averaging, and the judge's label.

    ``orient`` takes each view's probability of the judge's own label, so that swapping the answers changes nothing;
    without it, of answer 1 (the literal reading). A missing view becomes the mean of those present.

    Reference: arXiv 2605.15416, section 3. Reconstruction: the orientation.
    """
    views, mean = _normalised(probs)
    label = jnp.argmax(mean, axis=-1).astype(jnp.int32)
    chosen = jnp.where(label[:, None] == 0, views[..., 0], views[..., 1])
    return (chosen if orient else views[..., 0]), label


# --- training --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """How the estimator is trained. ``FitConfig(adaptive=False, beta=0.0)`` is the vanilla ranking baseline.

    Attributes:
      epochs, pairs, lr, weight_decay, tau, beta: the paper's values, by the note.
      batch: pairs a step (Reconstruction); the remainder of an epoch is left out, another one each time.
      gamma: the margin to start with, and the fixed one where it is not adaptive (Reconstruction).
      adaptive: choose gamma anew after every epoch, over all pairs (Reconstruction: once an epoch).
      optimizer: ``adam`` or ``sgd``; the note names both. The weight decay is added to the gradient.
      loss: ``rank``, or ``bce``: pointwise cross-entropy on the items of the same pairs (balanced classes).
      hidden: widths of the hidden layers.
    """

    epochs: int = 30
    pairs: int = 5000
    batch: int = 256
    lr: float = 1e-3
    weight_decay: float = 1e-4
    tau: float = 0.1
    beta: float = 1e-4
    gamma: float = 0.1
    adaptive: bool = True
    optimizer: Literal["adam", "sgd"] = "adam"
    loss: Literal["rank", "bce"] = "rank"
    hidden: tuple[int, ...] = (64, 32, 16)

    def __post_init__(self):
        for name in ("epochs", "pairs", "batch", "lr", "tau", "gamma"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: found {getattr(self, name)}, expected a positive number")
        for name in ("weight_decay", "beta"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}: found {getattr(self, name)}, expected 0 or more")


class History(NamedTuple):
    """Per epoch: mean loss (without the penalty), the margin after it, the Frobenius norm of the weights."""

    loss: Float[Array, " E"]
    gamma: Float[Array, " E"]
    norm: Float[Array, " E"]


class EstimatorState(NamedTuple):
    """A trained confidence. ``fallback``: a class was missing, so that :func:`estimate` is the mean view instead.

    ``ids`` are the items that trained it, if they were named.
    """

    params: Params
    gamma: Float[Array, ""]
    history: History
    fallback: Bool[Array, ""]
    ids: Int[Array, " n"] | None


def fit(
    rng: Key[Array, ""],
    s: Float[Array, "n T"],
    agree: Bool[Array, " n"] | Int[Array, " n"],
    cfg: FitConfig = FitConfig(),
    ids: Int[Array, " n"] | None = None,
) -> EstimatorState:
    """Train the confidence by ranking agreements above disagreements, alternating weights and margin.

    ``min over theta and gamma of mean softplus(-(C_i - C_j - gamma) / tau) + beta sqrt(sum ||W||_F^2) / gamma``: an
    epoch of gradient steps with gamma fixed, then gamma as the minimiser on a grid with theta fixed. Consumes ``rng``.

    Args:
      s: views, see :func:`features`; agree: 1 where the judge's label is the human's.
      ids: names of the rows; :func:`calibrate` then refuses to calibrate on any of them.

    Returns:
      An ``EstimatorState``. If all agree or all disagree there is nothing to rank: a warning, and ``fallback``.

    Raises:
      ConfigError: no rows, or NaN among readable views (``features`` fills missing ones).

    Reference: arXiv 2605.15416, adaptive objective (by the note).
    """
    if s.shape[0] == 0:
        raise ConfigError("s: found no rows, expected at least one training item")
    if is_concrete(s) and not np.isfinite(np.asarray(s)).all():
        raise ConfigError("s: found a view that is not finite, expected features() of the probabilities")
    if is_concrete(agree) and len(np.unique(np.asarray(agree).astype(bool))) == 1:
        warnings.warn("agree has one class only: the heuristic confidence is kept, nothing was trained", stacklevel=2)
    agree = agree.astype(bool)
    params, gamma, history = _fit(rng, s, agree, cfg)
    return EstimatorState(params, gamma, history, agree.all() | ~agree.any(), ids)


@partial(jax.jit, static_argnames=("cfg",))
def _fit(rng: Array, s: Array, agree: Array, cfg: FitConfig) -> tuple[Params, Array, History]:
    start, pairing, shuffling = jax.random.split(rng, 3)
    params = init_estimator(start, s.shape[1], cfg.hidden)
    i, j = sample_pairs(pairing, agree, cfg.pairs)
    rule = optax.adam(cfg.lr) if cfg.optimizer == "adam" else optax.sgd(cfg.lr)
    rule = optax.chain(optax.add_decayed_weights(cfg.weight_decay), rule)
    grid = jnp.asarray(GAMMA_GRID, s.dtype)
    batch = min(cfg.batch, cfg.pairs)
    steps = cfg.pairs // batch

    def objective(params, chosen, gamma):
        logits = ranking.logit(params, jnp.concatenate([s[i[chosen]], s[j[chosen]]]))
        right, wrong = jnp.split(logits, 2)
        if cfg.loss == "bce":
            return jnp.mean(jax.nn.softplus(-right) + jax.nn.softplus(wrong)), 0.0
        risk = ranking.soft_risk(jax.nn.sigmoid(right) - jax.nn.sigmoid(wrong), gamma, cfg.tau)
        return risk + cfg.beta * complexity_proxy(params, gamma), risk

    def step(carry, chosen):
        params, state, gamma = carry
        (total, risk), grads = jax.value_and_grad(objective, has_aux=True)(params, chosen, gamma)
        updates, state = rule.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, gamma), total if cfg.loss == "bce" else risk

    def epoch(carry, index):
        shuffled = jax.random.permutation(jax.random.fold_in(shuffling, index), cfg.pairs)
        (params, state, gamma), losses = jax.lax.scan(step, carry, shuffled[: steps * batch].reshape(steps, batch))
        norm = ranking.frobenius_root(params)
        if cfg.adaptive and cfg.loss == "rank":
            conf = confidence(params, s)
            gamma = adaptive_gamma(ranking.margins(conf, i, j), norm, cfg.beta, grid, cfg.tau)
        return (params, state, gamma), (losses.mean(), gamma, norm)

    carry = (params, rule.init(params), jnp.asarray(cfg.gamma, s.dtype))
    (params, _, gamma), history = jax.lax.scan(epoch, carry, jnp.arange(cfg.epochs))
    return params, gamma, History(*history)


def estimate(state: EstimatorState, s: Float[Array, "*b T"]) -> Float[Array, "*b"]:
    """The trained confidence of views; the mean of the (oriented) views where nothing could be trained."""
    return jnp.where(state.fallback, s.mean(-1), confidence(state.params, s))


def check_disjoint(train: Int[Array, " n"], other: Int[Array, " k"]) -> None:
    """Raise ``ConfigError`` if a readable id occurs in both: calibration items must not have trained the estimator."""
    if not (is_concrete(train) and is_concrete(other)):
        return
    shared = np.intersect1d(np.asarray(train), np.asarray(other))
    if shared.size:
        raise ConfigError(
            f"ids: found {shared.size} calibration items that also trained the estimator (first {shared[0]}), "
            "expected disjoint items: the guarantee does not hold on training items"
        )


def calibrate(
    state: EstimatorState,
    s: Float[Array, "n T"],
    agree: Bool[Array, " n"] | Int[Array, " n"],
    alpha: Num[ArrayLike, ""],
    delta: Num[ArrayLike, ""],
    ids: Int[Array, " n"] | None = None,
    grid: Float[Array, " g"] | None = None,
    min_count: int = 30,
) -> Threshold:
    """:func:`fixed_sequence_test` of a trained estimator on fresh items.

    Raises:
      ConfigError: an id that also trained the estimator, or no ids where training had them.
    """
    if state.ids is not None:
        if ids is None:
            raise ConfigError("ids: found none, expected the calibration items' ids, as training had ids")
        check_disjoint(state.ids, ids)
    return fixed_sequence_test(estimate(state, s), ~agree.astype(bool), alpha, delta, grid, min_count)
