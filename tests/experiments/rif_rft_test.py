"""The RIF-RFT experiment: matched gain, what is counted as a rollout, and the paper's shapes."""

import numpy as np

from experiments import rif_rft
from experiments.rl_config import TINY


def test_forgetting_is_compared_at_matched_gain():
    gain, forgetting = np.array([0.3, 0.1, -0.2]), np.array([-0.2, -0.05, 0.4])
    assert rif_rft.matched(gain, forgetting, 0.1) == -0.05
    np.testing.assert_allclose(rif_rft.matched(gain, forgetting, 0.2), -0.125)
    np.testing.assert_allclose(rif_rft.matched(gain, forgetting, 0.05), -0.025)
    less = np.broadcast_to([[0.2, -0.05], [0.1, -0.02]], (6, 2, 2))
    more = np.broadcast_to([[0.4, -0.4], [0.1, -0.1]], (6, 2, 2))
    np.testing.assert_allclose(rif_rft.advantage(less, more), [0.15] * 3)
    assert np.isnan(rif_rft.advantage(-less, more).value)


def test_the_paper_preset_checks_shapes():
    rows = rif_rft.run(rif_rft.PRESETS["paper"]).rows
    assert "gradient of every parameter" in rows[-1]["shape"]


def test_rollouts_are_counted():
    cfg = rif_rft.Config(**{**TINY, "warm_steps": 2, "steps": 2, "seeds": 1, "rates": (1e-3,)}, filter_rollouts=2)
    result = rif_rft.run(cfg)
    rows = {r["arm"]: r for r in result.rows}
    assert list(rows) == list(rif_rft.ARMS)
    assert rows["SFT"]["rollouts"] == 0
    assert rows["GRPO"]["rollouts"] == rows["rejection-sampling SFT"]["rollouts"] == 3 * 2 * 32
    # A model that has learnt nothing solves nothing: all is filtered out and nothing trained.
    filtered = rows["RIF-RFT"]
    least = 3 * 64 * 2
    assert least <= filtered["rollouts"] <= least + rows["GRPO"]["rollouts"]
    assert filtered["kept"] < 0.5
