"""Reinforcement learning from group-relative rewards, as five small choices that compose.

advantage x prompt weight x token weight x ratio x aggregation, plus KL, filter and reward functions, made into a loss
by :func:`make_policy_loss`. The methods of this family are one choice each: ``adv_prompt_weighted`` (asymmetric
weights), ``lambda_grpo_weight`` (lambda-GRPO), ``ripo`` (RIPO), ``ensemble_reward`` (RLER), ``rif_filter`` (RIF-RFT).
"""

from jaxmeth.rl import presets as presets
from jaxmeth.rl.advantages import GroupStats as GroupStats
from jaxmeth.rl.advantages import adv_batch_std as adv_batch_std
from jaxmeth.rl.advantages import adv_dr_grpo as adv_dr_grpo
from jaxmeth.rl.advantages import adv_grpo as adv_grpo
from jaxmeth.rl.advantages import adv_reinforce as adv_reinforce
from jaxmeth.rl.advantages import adv_rloo as adv_rloo
from jaxmeth.rl.advantages import group_filter as group_filter
from jaxmeth.rl.advantages import group_stats as group_stats
from jaxmeth.rl.aggregate import aggregate as aggregate
from jaxmeth.rl.aggregate import aggregate_denominator as aggregate_denominator
from jaxmeth.rl.asymmetric import PromptWeight as PromptWeight
from jaxmeth.rl.asymmetric import adv_prompt_weighted as adv_prompt_weighted
from jaxmeth.rl.asymmetric import as_prompt_weight as as_prompt_weight
from jaxmeth.rl.asymmetric import effective_weight as effective_weight
from jaxmeth.rl.asymmetric import logodds_step as logodds_step
from jaxmeth.rl.asymmetric import optimal_time as optimal_time
from jaxmeth.rl.asymmetric import optimal_weight as optimal_weight
from jaxmeth.rl.asymmetric import success_rate as success_rate
from jaxmeth.rl.asymmetric import time_to_target as time_to_target
from jaxmeth.rl.asymmetric import zero_success_warmup as zero_success_warmup
from jaxmeth.rl.lambda_grpo import lambda_grpo_weight as lambda_grpo_weight
from jaxmeth.rl.lambda_grpo import process_rewards as process_rewards
from jaxmeth.rl.lambda_grpo import process_set_size as process_set_size
from jaxmeth.rl.lambda_grpo import process_tree_stats as process_tree_stats
from jaxmeth.rl.policy_loss import PolicyLoss as PolicyLoss
from jaxmeth.rl.policy_loss import RolloutBatch as RolloutBatch
from jaxmeth.rl.policy_loss import keep_rollouts as keep_rollouts
from jaxmeth.rl.policy_loss import make_policy_loss as make_policy_loss
from jaxmeth.rl.ratios import Surrogate as Surrogate
from jaxmeth.rl.ratios import cispo as cispo
from jaxmeth.rl.ratios import gmpo as gmpo
from jaxmeth.rl.ratios import gspo as gspo
from jaxmeth.rl.ratios import gspo_token as gspo_token
from jaxmeth.rl.ratios import kl as kl
from jaxmeth.rl.ratios import ppo_clip as ppo_clip
from jaxmeth.rl.ratios import reinforce as reinforce
from jaxmeth.rl.rewards import verify as verify
from jaxmeth.rl.rif import ContinualMetrics as ContinualMetrics
from jaxmeth.rl.rif import ContinualRun as ContinualRun
from jaxmeth.rl.rif import FilterResult as FilterResult
from jaxmeth.rl.rif import continual_metrics as continual_metrics
from jaxmeth.rl.rif import gradient_scale as gradient_scale
from jaxmeth.rl.rif import kept_indices as kept_indices
from jaxmeth.rl.rif import reward_variance as reward_variance
from jaxmeth.rl.rif import rif_filter as rif_filter
from jaxmeth.rl.rif import run_continual as run_continual
from jaxmeth.rl.ripo import dcpo as dcpo
from jaxmeth.rl.ripo import dcpo_bounds as dcpo_bounds
from jaxmeth.rl.ripo import fisher_distance as fisher_distance
from jaxmeth.rl.ripo import ripo as ripo
from jaxmeth.rl.ripo import ripo_bounds as ripo_bounds
from jaxmeth.rl.rler import BiasMetrics as BiasMetrics
from jaxmeth.rl.rler import Ensemble as Ensemble
from jaxmeth.rl.rler import EnsembleRewards as EnsembleRewards
from jaxmeth.rl.rler import bias_metrics as bias_metrics
from jaxmeth.rl.rler import cluster_answers as cluster_answers
from jaxmeth.rl.rler import ensemble_reward as ensemble_reward
from jaxmeth.rl.rler import rler_rewards as rler_rewards
from jaxmeth.rl.rler import select_rollouts as select_rollouts
