"""Uncertainty of generated answers. The seam is ``Score``: outputs -> [B], higher = less trustworthy.

``uncertainty.judge`` is a module of its own, loaded on first use: when to trust a judge of answers.
"""

import importlib

from jaxmeth.uncertainty.baselines import attention_score as attention_score
from jaxmeth.uncertainty.baselines import mean_token_entropy as mean_token_entropy
from jaxmeth.uncertainty.baselines import msp as msp
from jaxmeth.uncertainty.baselines import perplexity as perplexity
from jaxmeth.uncertainty.baselines import simple_focus as simple_focus
from jaxmeth.uncertainty.metrics import Interval as Interval
from jaxmeth.uncertainty.metrics import auroc as auroc
from jaxmeth.uncertainty.metrics import bootstrap as bootstrap
from jaxmeth.uncertainty.metrics import paired_bootstrap as paired_bootstrap
from jaxmeth.uncertainty.metrics import prediction_rejection_ratio as prediction_rejection_ratio
from jaxmeth.uncertainty.metrics import rejection_area as rejection_area
from jaxmeth.uncertainty.rauq import RAUQConfig as RAUQConfig
from jaxmeth.uncertainty.rauq import RAUQResult as RAUQResult
from jaxmeth.uncertainty.rauq import middle_layers as middle_layers
from jaxmeth.uncertainty.rauq import rauq as rauq
from jaxmeth.uncertainty.rauq import select_heads as select_heads
from jaxmeth.uncertainty.rauq_online import RAUQState as RAUQState
from jaxmeth.uncertainty.rauq_online import rauq_finalize as rauq_finalize
from jaxmeth.uncertainty.rauq_online import rauq_init as rauq_init
from jaxmeth.uncertainty.rauq_online import rauq_step as rauq_step
from jaxmeth.uncertainty.taps import answer_attention_tap as answer_attention_tap
from jaxmeth.uncertainty.taps import answer_attention_tap_init as answer_attention_tap_init
from jaxmeth.uncertainty.taps import previous_token_attention as previous_token_attention
from jaxmeth.uncertainty.taps import rauq_tap as rauq_tap
from jaxmeth.uncertainty.taps import rauq_tap_init as rauq_tap_init
from jaxmeth.uncertainty.taps import token_signals as token_signals


def __getattr__(name: str):
    # The judge trains a network: optax and Flax's modules take ten times as long to import as the scores.
    if name == "judge":
        return importlib.import_module("jaxmeth.uncertainty.judge")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
