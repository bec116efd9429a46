"""The policy loss: five small choices (advantage, prompt weight, token weight, ratio, aggregation) made into one."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxmeth.rl._common import as_float, check_choice, check_number, check_shape, usable
from jaxmeth.rl.advantages import adv_batch_std, adv_grpo
from jaxmeth.rl.aggregate import MODES, aggregate, aggregate_denominator
from jaxmeth.rl.asymmetric import PromptWeight, adv_prompt_weighted
from jaxmeth.rl.ratios import KL_KINDS, gmpo, gspo, gspo_token, kl, ppo_clip, safe_exp
from jaxmeth.types import ConfigError


class RolloutBatch(NamedTuple):
    """Rollouts of P prompts, G each, prompt-major: row i of the N = P G belongs to prompt i // G.

    Ragged groups: rewards and valid [N], with ``group_ids`` [N] in 0 .. num_groups-1.

    Attributes:
      rewards: of each rollout; one that is NaN or infinite counts as not valid.
      valid: nonzero = this rollout exists and could be scored. Never changes ``mask``: a rollout that must leave the
        denominator needs mask 0 too (:func:`keep_rollouts` does both).
      tokens: sampled tokens; only token weights read them.
      mask: nonzero = counts in the loss (not padding, tool output or a truncated completion).
      logp_old: log-probabilities under the policy that sampled; None = on-policy.
      logp_ref: under the reference of the KL term; needed where beta > 0.
      alive: nonzero = a real token, tool output included; None = ``mask``.
    """

    rewards: Num[Array, "P G"] | Num[Array, " N"]
    valid: Num[Array, "P G"] | Bool[Array, "P G"] | Num[Array, " N"] | Bool[Array, " N"] | None
    tokens: Int[Array, "N T"] | None
    mask: Num[Array, "N T"] | Bool[Array, "N T"]
    logp_old: Float[Array, "N T"] | None = None
    logp_ref: Float[Array, "N T"] | None = None
    alive: Num[Array, "N T"] | Bool[Array, "N T"] | None = None
    group_ids: Int[Array, " N"] | None = None


Metrics = dict[str, Array]
Part = Any
"""A function, or None for one that may be left out. Not annotated closer: ``PolicyLoss`` itself refuses the rest."""


def keep_rollouts(batch: RolloutBatch, keep: Num[Array, "..."] | Bool[Array, "..."]) -> RolloutBatch:
    """Leave the rollouts out that are not kept: not valid, not in the loss or its denominator, in no process set.

    Args:
      keep: the shape of ``batch.rewards``, nonzero = keep; for instance what ``select_rollouts`` selects.
    """
    check_shape("keep", keep, batch.rewards.shape, "rewards")
    keep = keep != 0
    valid = keep if batch.valid is None else keep & (batch.valid != 0)
    rows = keep.reshape(-1)[:, None]
    alive = None if batch.alive is None else (batch.alive != 0) & rows
    return batch._replace(valid=valid, mask=(batch.mask != 0) & rows, alive=alive)


def function_of(part: Any) -> Any:
    """What ``partial`` binds arguments of, or the function itself."""
    return function_of(part.func) if isinstance(part, partial) else part


def _scales(advantage: Any) -> bool:
    """Whether an advantage of the library is more than r - m times a constant of the prompt's size."""
    if function_of(advantage) is adv_prompt_weighted:
        bound = advantage.keywords if isinstance(advantage, partial) else {}
        return bound.get("weight") not in ("rloo", "dr_grpo")
    return function_of(advantage) in (adv_grpo, adv_batch_std)


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss made of independent choices; call it with ``(logp, batch)`` to get ``(loss, metrics)``.

    With A = w_prompt advantage(rewards, valid), s = ratio(logp, logp_old, A, mask), u = token_weight(tokens)::

        L = aggregate(-s u) + beta aggregate(kl (u if weight_kl else 1))

    Static, hashable, and a plain function of arrays: safe under ``jit``, ``vmap`` over a leading axis and ``grad``;
    differentiable in ``logp`` only. ``dataclasses.replace(loss, ratio=rl.ripo)`` changes one choice. Arguments of the
    parts are bound by ``functools.partial``. :mod:`jaxmeth.rl.presets` has grpo, dr_grpo, dapo, rloo and gspo.

    Attributes:
      advantage: ``(rewards, valid) -> [P, G]``.
      prompt_weight: ``(rewards, valid) -> [P]``, None = 1.
      token_weight: ``(tokens, alive, group_size) -> [N, T]``, at least 0, None = 1. It multiplies the loss of a token
        after clipping.
      ratio: ``(logp, logp_old, adv, mask) -> Surrogate``.
      aggregation: a mode of :func:`jaxmeth.rl.aggregate`.
      kl_kind, kl_clamp: of :func:`jaxmeth.rl.kl`.
      beta: weight of the KL to ``logp_ref``; 0.04 in the GRPO paper, 0 in today's practice.
      weight_kl: whether the token weight multiplies the KL too, as in lambda-GRPO.
      normalise: ``tokens``, or ``weights``: divide by the sum of token weights (with aggregation token_mean only).
      max_len: for token_sum_norm, the longest completion of the run.
      group_filter: ``(rewards, valid) -> bool[P]``; a dropped group leaves loss and denominator (DAPO). None = all.
      count_empty_rows: see :func:`jaxmeth.rl.aggregate`.
      kl_bias_correction: multiply the KL by the importance ratio r, gradient included (TRL).
      num_groups: static number of groups of a batch with ``group_ids``; the functions above are then called with
        ``group_ids`` and ``num_groups`` by keyword (token_weight: ``group_size`` None and ``group_ids``).

    Raises:
      ConfigError: an unknown name; beta negative or NaN; ``normalise="weights"`` without token_mean; max_len missing
        for token_sum_norm; a token weight on a sequence-level ratio (undefined); a prompt weight of
        :func:`jaxmeth.rl.as_prompt_weight` on an advantage that is scaled already (divided by the standard deviation,
        or :func:`jaxmeth.rl.adv_prompt_weighted` with a weight other than ``rloo`` and ``dr_grpo``). When called:
        shapes that disagree, a group size that does not divide the batch, logp_ref or tokens missing.
    """

    advantage: Part = adv_grpo
    prompt_weight: Part = None
    token_weight: Part = None
    ratio: Part = ppo_clip
    aggregation: str = "token_mean"
    kl_kind: str = "k3"
    beta: float = 0.0
    weight_kl: bool = False
    normalise: str = "tokens"
    max_len: int | None = None
    group_filter: Part = None
    count_empty_rows: bool = True
    kl_clamp: tuple[float, float] | None = None
    kl_bias_correction: bool = False
    num_groups: int | None = None

    def __post_init__(self):
        for name in ("advantage", "prompt_weight", "token_weight", "ratio", "group_filter"):
            part = getattr(self, name)
            if not callable(part) and not (part is None and name not in ("advantage", "ratio")):
                raise ConfigError(f"{name}: found {part!r}, expected a function")
        check_choice("aggregation", self.aggregation, MODES)
        check_choice("kl_kind", self.kl_kind, KL_KINDS)
        check_choice("normalise", self.normalise, ("tokens", "weights"))
        check_number("beta", self.beta, 0)
        if self.normalise == "weights" and self.aggregation != "token_mean":
            raise ConfigError(f"normalise: found 'weights' with {self.aggregation!r}, expected it with 'token_mean'")
        if self.aggregation == "token_sum_norm":
            if self.max_len is None:
                raise ConfigError("max_len: found None, expected the longest completion length with 'token_sum_norm'")
            check_number("max_len", self.max_len, 1)
        if self.token_weight is not None and function_of(self.ratio) in (gspo, gspo_token, gmpo):
            raise ConfigError(
                f"token_weight: found one with ratio {function_of(self.ratio).__name__}, expected a ratio of tokens"
            )
        if isinstance(function_of(self.prompt_weight), PromptWeight) and _scales(self.advantage):
            found = f"{function_of(self.prompt_weight).weight!r} on {function_of(self.advantage).__name__}"
            raise ConfigError(
                f"prompt_weight: found {found}, which scales already; expected advantage adv_dr_grpo or adv_rloo"
            )

    def denominator(self, batch: RolloutBatch) -> Float[Array, ""]:
        """What the loss of this batch is divided by; those of the parts of a split batch add up.

        Pass their sum (or ``psum``) as ``denominator`` to each part, and sum losses and gradients.
        """
        groups = _Layout.of(batch, self.num_groups)
        mask, _ = self._mask(batch, groups)
        weight = self._token_weight(batch, groups) if self.normalise == "weights" else None
        return self._divisor(mask, weight, groups)

    def __call__(
        self, logp: Float[Array, "N T"], batch: RolloutBatch, denominator: Num[Array, ""] | float | None = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Loss and metrics (masked means unless said otherwise; constants).

        ``reward`` over usable rollouts; ``invalid`` number of rollouts without a usable reward; ``tokens`` number of
        tokens in the loss; ``clip_low`` and ``clip_high`` shares clipped; ``kl_old`` mean of logp_old - logp;
        ``kl_ref`` mean KL estimate, where there is a reference; ``token_weight`` and ``kept_groups``, where used.
        """
        batch = jax.lax.stop_gradient(batch)
        groups = _Layout.of(batch, self.num_groups)
        check_shape("logp", logp, batch.mask.shape, "mask")
        mask, metrics = self._mask(batch, groups)
        adv = self._advantage(batch, groups)
        surrogate = self.ratio(logp, batch.logp_old, adv, mask)
        weight = self._token_weight(batch, groups)
        if denominator is None:
            divisor = self._divisor(mask, weight if self.normalise == "weights" else None, groups)
            denominator = jnp.where(divisor > 0, divisor, 1)  # token weights may all be 0
        reduce = partial(
            aggregate, mask=mask, mode=self.aggregation, denominator=denominator, max_len=self.max_len,
            count_empty_rows=self.count_empty_rows, group_ids=self._aggregation_ids(groups),
        )  # fmt: skip
        loss = reduce(-surrogate.value if weight is None else -surrogate.value * weight)

        def mean(x: Array) -> Array:
            return aggregate(jax.lax.stop_gradient(as_float(x)), mask)

        metrics |= {"clip_low": mean(surrogate.clipped_low), "clip_high": mean(surrogate.clipped_high)}
        old = logp if batch.logp_old is None else batch.logp_old
        metrics["kl_old"] = mean(as_float(old) - as_float(logp))
        if weight is not None:
            metrics["token_weight"] = mean(weight)
        if batch.logp_ref is None:
            if _positive(self.beta):
                raise ConfigError(f"logp_ref: found None, expected log-probabilities with beta {self.beta}")
            return loss, metrics
        divergence = self._kl(logp, batch, mask)
        metrics["kl_ref"] = mean(divergence)
        if _positive(self.beta):
            loss += self.beta * reduce(divergence * weight if self.weight_kl and weight is not None else divergence)
        return loss, metrics

    def _mask(self, batch: RolloutBatch, groups: "_Layout") -> tuple[Array, Metrics]:
        mask = batch.mask != 0
        rewards, ok = usable(batch.rewards, batch.valid)
        n = ok.sum()
        metrics = {"reward": (rewards / jnp.maximum(n, 1)).sum(), "invalid": ok.size - n}
        if self.group_filter is not None:
            keep = self.group_filter(batch.rewards, batch.valid, **groups.keywords)
            metrics["kept_groups"] = keep.astype(as_float(0.0).dtype).sum() / max(keep.size, 1)
            mask &= groups.rows(keep)[:, None]
        return mask, metrics | {"tokens": mask.sum()}

    def _advantage(self, batch: RolloutBatch, groups: "_Layout") -> Array:
        adv = self.advantage(batch.rewards, batch.valid, **groups.keywords)
        check_shape("advantage", adv, batch.rewards.shape, "rewards")
        if self.prompt_weight is not None:
            weight = self.prompt_weight(batch.rewards, batch.valid, **groups.keywords)
            check_shape("prompt_weight", weight, (groups.count,), "the prompts")
            adv = adv.reshape(-1) * groups.rows(weight)
        return adv.reshape(-1)

    def _token_weight(self, batch: RolloutBatch, groups: "_Layout") -> Array | None:
        if self.token_weight is None:
            return None
        if batch.tokens is None:
            raise ConfigError("tokens: found None, expected the sampled tokens with a token weight")
        alive = batch.mask if batch.alive is None else batch.alive
        ragged = {} if groups.ids is None else {"group_ids": groups.ids}
        weight = self.token_weight(batch.tokens, alive != 0, groups.size, **ragged)
        check_shape("token_weight", weight, batch.mask.shape, "mask")
        return weight

    def _kl(self, logp: Array, batch: RolloutBatch, mask: Array) -> Array:
        check_shape("logp_ref", batch.logp_ref, logp.shape, "logp")
        now, reference = (jnp.where(mask, as_float(x), 0) for x in (logp, batch.logp_ref))
        divergence = kl(now, reference, self.kl_kind, self.kl_clamp)
        if not self.kl_bias_correction:
            return divergence
        old = jax.lax.stop_gradient(now) if batch.logp_old is None else jnp.where(mask, as_float(batch.logp_old), 0)
        return divergence * safe_exp(now - old, 20.0)

    def _aggregation_ids(self, groups: "_Layout") -> Array | None:
        return groups.row_ids() if self.aggregation == "group_token_mean" else None

    def _divisor(self, mask: Array, weight: Array | None, groups: "_Layout") -> Array:
        return aggregate_denominator(
            mask, self.aggregation, count_empty_rows=self.count_empty_rows, max_len=self.max_len,
            group_ids=self._aggregation_ids(groups), weight=weight,
        )  # fmt: skip


def _positive(beta: Any) -> bool:
    """Whether the KL term may be there: a traced beta may be anything."""
    return isinstance(beta, jax.Array) or beta > 0


class _Layout(NamedTuple):
    """How the rows of a batch make groups."""

    ids: Array | None
    count: int
    size: int | None

    @classmethod
    def of(cls, batch: RolloutBatch, num_groups: int | None) -> "_Layout":
        rows, rewards = batch.mask.shape[0], batch.rewards
        if batch.group_ids is not None:
            check_shape("group_ids", batch.group_ids, (rows,), "the rows of mask")
            if num_groups is None:
                raise ConfigError("num_groups: found None, expected the number of groups of a batch with group_ids")
            return cls(batch.group_ids, num_groups, None)
        if rewards.ndim != 2 or rewards.size != rows:
            raise ConfigError(
                f"rewards: found shape {rewards.shape} for {rows} rows, expected [P, G] with P G = {rows}: "
                "the group size must divide the batch"
            )
        return cls(None, *rewards.shape)

    @property
    def keywords(self) -> dict[str, Any]:
        return {} if self.ids is None else {"group_ids": self.ids, "num_groups": self.count}

    def row_ids(self) -> Array:
        return jnp.arange(self.count * self.size) // max(self.size, 1) if self.ids is None else self.ids

    def rows(self, per_group: Array) -> Array:
        """[P] -> [N]."""
        return jnp.repeat(per_group, self.size) if self.ids is None else per_group[self.ids]


make_policy_loss = PolicyLoss
"""Choose the parts by keyword: ``make_policy_loss(advantage=adv_rloo, ratio=ripo)(logp, batch)``."""
