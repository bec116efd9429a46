"""Policy losses of the literature. Each returns a :class:`jaxmeth.rl.PolicyLoss`; keywords replace single choices."""

from functools import partial
from typing import Any

from jaxmeth.rl.advantages import adv_dr_grpo, adv_grpo, adv_rloo, group_filter
from jaxmeth.rl.policy_loss import PolicyLoss
from jaxmeth.rl.ratios import gspo as gspo_ratio
from jaxmeth.rl.ratios import ppo_clip


def grpo(**changes: Any) -> PolicyLoss:
    """GRPO: standardised advantages, PPO clipping at 0.2, mean over sequences of token means; no KL (the paper: 0.04).

    Reference: Z. Shao et al., "DeepSeekMath", arXiv 2402.03300, equation 3.
    """
    return PolicyLoss(**{"advantage": adv_grpo, "ratio": ppo_clip, "aggregation": "seq_mean_token_mean"} | changes)


def dr_grpo(max_len: int, **changes: Any) -> PolicyLoss:
    """Dr. GRPO: no standard deviation, and token sums over the constant N max_len.

    Reference: Z. Liu et al., "Understanding R1-Zero-like training", arXiv 2503.20783.
    """
    parts = {"advantage": adv_dr_grpo, "ratio": ppo_clip, "aggregation": "token_sum_norm", "max_len": max_len}
    return PolicyLoss(**parts | changes)


def dapo(**changes: Any) -> PolicyLoss:
    """DAPO: groups of equal rewards dropped, clipping at 0.2 and 0.28, mean over all tokens.

    Reference: Q. Yu et al., "DAPO", arXiv 2503.14476.
    """
    ratio = partial(ppo_clip, eps_low=0.2, eps_high=0.28)
    parts = {"advantage": adv_grpo, "ratio": ratio, "aggregation": "token_mean", "group_filter": group_filter}
    return PolicyLoss(**parts | changes)


def rloo(**changes: Any) -> PolicyLoss:
    """RLOO: leave-one-out baseline, PPO clipping at 0.2, mean over all tokens.

    Reference: A. Ahmadian et al., "Back to basics", arXiv 2402.14740.
    """
    return PolicyLoss(**{"advantage": adv_rloo, "ratio": ppo_clip, "aggregation": "token_mean"} | changes)


def gspo(**changes: Any) -> PolicyLoss:
    """GSPO: one ratio a sequence, clipped at 3e-4 and 4e-4, mean over sequences.

    Reference: C. Zheng et al., "Group sequence policy optimization", arXiv 2507.18071.
    """
    return PolicyLoss(**{"advantage": adv_grpo, "ratio": gspo_ratio, "aggregation": "seq_mean_token_mean"} | changes)
