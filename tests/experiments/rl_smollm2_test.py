"""The arms on a chat model: text is read on the host, seeds are stored one by one, other experiments refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import core, lambda_grpo, rl_compose, rl_smollm2, rl_tasks
from experiments.rl_config import TINY
from jaxmeth import hf, models
from jaxmeth.types import ConfigError

SMALL = {
    **TINY, "model": "smollm2", "steps": 2, "evaluations": 1, "rollouts": 8, "group_size": 4, "seeds": 1,
    "train_problems": 8, "test_problems": 4, "test_samples": 1, "rates": (1e-2,), "simulation_seeds": 0,
}  # fmt: skip


class _Characters:
    """A tokenizer of the tasks' characters."""

    class _Encoded:
        def __init__(self, ids):
            self.ids = ids

    def encode(self, text, add_special_tokens=True):
        known = "".join(c for c in text.lower() if c in rl_tasks.CHARACTERS)
        return self._Encoded(rl_tasks.encode(known))

    def decode(self, ids, skip_special_tokens=True):
        return rl_tasks.decode(ids)


@pytest.fixture
def bench(monkeypatch):
    cfg = models.DecoderConfig(
        "llama", rl_tasks.VOCABULARY, 16, 1, 1, 1, 16, 32, 96, tie_embeddings=True, eos_token_ids=(rl_tasks.END,)
    )
    params = models.init(cfg, jax.random.key(0))
    checkpoint = hf.Checkpoint(cfg, params, _Characters(), "{{ messages[0]['content'] }}")
    monkeypatch.setattr(rl_smollm2.hf, "default", lambda: checkpoint)
    return rl_smollm2.prepare(lambda_grpo.Config(**SMALL, temperatures=()))


def test_answers_are_read_as_text(bench):
    problem = rl_tasks.Problem("chain_sum", "2+3=", "5", bench.pool[0].question)
    right, wrong = [[*rl_tasks.encode(text), rl_tasks.END] for text in ("5", "6")]
    tokens = jnp.array([right, wrong, wrong, right])
    mask = jnp.array([[True, True], [True, True], [True, True], [False, False]])
    np.testing.assert_array_equal(bench.right([problem, problem], tokens, mask), [[1, 0], [0, 0]])
    ids, shown = bench.tokens([bench.pool[0]])
    assert rl_tasks.decode(np.asarray(ids)[0]) == bench.pool[0].question.lower().replace("?", "").replace(".", "")
    assert int(shown.sum()) == len(bench.prompts[bench.pool[0].question])


def test_seeds_are_stored_and_found_again(bench, monkeypatch):
    cfg = lambda_grpo.Config(**SMALL, temperatures=())
    arms = [a for a in lambda_grpo.arms() if a.name in (lambda_grpo.GRPO, lambda_grpo.LAMBDA)]
    folder = core.RunDir()
    measured = rl_smollm2.compare(cfg, folder, bench, arms)
    weight = measured.curves[lambda_grpo.LAMBDA]["token_weight"]
    assert weight.shape == (1, 2)
    assert np.isnan(weight[0, 0])
    assert 0 < weight[0, 1] <= 1
    base = measured.curves[lambda_grpo.GRPO]
    assert np.isfinite(base["loss"][:, 1:]).all()
    assert ((base["pass"] >= 0) & (base["pass"] <= 1)).all()
    monkeypatch.setattr(rl_smollm2, "_train", None)
    again = rl_smollm2.compare(cfg, folder, bench, arms)
    np.testing.assert_array_equal(
        again.curves[lambda_grpo.LAMBDA]["entropy"], measured.curves[lambda_grpo.LAMBDA]["entropy"]
    )


def test_an_experiment_without_it_refuses():
    with pytest.raises(ConfigError, match="model: found 'smollm2', expected tiny"):
        rl_compose.Config(model="smollm2")
    with pytest.raises(ConfigError, match="model: found 'large', expected tiny or smollm2"):
        lambda_grpo.Config(model="large")
