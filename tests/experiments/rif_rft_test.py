"""The RIF-RFT experiment: matched gain, what is counted as a rollout, and the paper's shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import core, rif_rft, rl_continual
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


def test_a_task_of_which_nothing_is_kept_is_said_to_be_skipped():
    noted = rif_rft.skipped({"RIF-RFT": {"skipped": np.array([[0, 2], [1, 0], [0, 0]])}})
    assert "the task was skipped, in 3 (seed, task) of the 6 trainings of 3 seeds at 2 rate(s)" in noted[0]
    assert rif_rft.skipped({"RIF-RFT": {"skipped": np.zeros((3, 2))}}) == []
    stored = {"scores": np.full((2, 4, 4), 0.5)} | dict.fromkeys(("general loss", "KL", "kept", "sampled"), np.ones(2))
    np.testing.assert_array_equal(rif_rft.measures(stored | {"skipped": np.array([0, 3])})["skipped"], [0, 3])


@pytest.mark.slow
def test_rollouts_are_counted():
    mini = {**TINY, "warm_steps": 2, "steps": 2, "seeds": 1, "rates": (1e-3,), "simulation_seeds": 0}
    cfg = rif_rft.Config(**mini, filter_rollouts=2, replay=0.5)
    folder = core.RunDir()
    result = rif_rft.run(cfg, folder)
    rows = {r["arm"]: r for r in result.tables()["tiny model"]}
    assert list(rows) == list(rif_rft.ARMS)
    assert rows["SFT"]["rollouts"] == 0
    assert rows["GRPO"]["rollouts"] == rows["rejection-sampling SFT"]["rollouts"] == 3 * 2 * 32
    # A model that has learnt nothing solves nothing: all is filtered out and nothing trained.
    filtered = rows["RIF-RFT"]
    least = 3 * 64 * 2
    assert least <= filtered["rollouts"] <= least + rows["GRPO"]["rollouts"]
    assert filtered["kept"] < 0.5
    skips = int(folder.load(f"arm{rif_rft.ARMS.index('RIF-RFT')}-rate0.001")["skipped"][0])
    assert skips >= 1
    assert any(f"the task was skipped, in {skips} (seed, task)" in note for note in result.notes)
    # With KL, with replay and joint: all differ from plain SFT, from the first task on or from the second.
    scores = [folder.load(f"arm{i}-rate0.001") for i in range(len(rif_rft.ARMS))]
    losses = [float(s["general loss"][0]) for s in scores[:4]]
    assert len({*losses}) == 4, losses
    assert all(s["KL"][0] > 0 for s in scores[:4])


def test_divergence_is_exact():
    rng = np.random.default_rng(0)
    now, before = (jax.nn.log_softmax(jnp.asarray(rng.normal(size=(2, 3, 5)))) for _ in range(2))
    expected = [
        [sum(np.exp(n) * (n - b)) for n, b in zip(*rows, strict=True)] for rows in zip(now, before, strict=True)
    ]
    np.testing.assert_allclose(rl_continual.divergence(now, before), expected, rtol=1e-5)
    assert np.abs(rl_continual.divergence(now, now)).max() == 0
