"""The arms on a chat model: text is read on the host, seeds are stored one by one, other models are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import asymmetric, core, lambda_grpo, rif_rft, ripo, rl_arms, rl_compose, rl_smollm2, rl_tasks, rler
from experiments.rl_config import TINY
from jaxmeth import hf, models, train
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


@pytest.mark.slow
def test_seeds_are_stored_and_found_again(bench, monkeypatch):
    cfg = lambda_grpo.Config(**SMALL, temperatures=())
    arms = [a for a in lambda_grpo.arms() if a.name in (lambda_grpo.GRPO, lambda_grpo.LAMBDA)]
    folder = core.RunDir()
    measured = rl_smollm2.compare(cfg, folder, bench, arms)
    assert (measured.edge, measured.selection) == ({}, {})
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


def test_answers_vote_by_what_they_state(bench):
    texts = [["it is 5.", "5", "six", "05"], ["5", "-5", "1,005", "5."]]
    problem = bench.pool[0]._replace(task="chain_sum", answer="5")
    ids = [[rl_tasks.encode("".join(c for c in t if c in rl_tasks.CHARACTERS)) for t in row] for row in texts]
    tokens = jnp.asarray([[i + [0] * (8 - len(i)) for i in row] for row in ids])
    logp = jnp.where(tokens > 0, -0.5, 0.0)
    made = train.Rollouts(None, None, tokens, tokens > 0, logp)
    judged = bench.judged([problem], made, made)
    np.testing.assert_array_equal(judged.right[:, 0], [[1, 1, 0, 0], [1, 0, 0, 1]])
    # By what is stated, among all eight answers; "six" states no number.
    np.testing.assert_array_equal(rl_arms.same_answers(judged)[0], [[0, 0, -1, 3], [0, 5, 6, 0]])
    np.testing.assert_allclose(rler.confidence(judged).reward[:, 0], np.full((2, 4), np.exp(-0.5)), rtol=1e-6)
    asked = (rler.ORACLE, "ensemble hard", "frozen votes")
    found = {a.name: a.reward(judged).reward[:, 0] for a in rler.arms() if a.name in asked}
    np.testing.assert_array_equal(found[rler.ORACLE], judged.right[:, 0])
    np.testing.assert_array_equal(found["ensemble hard"], judged.right[:, 0])
    np.testing.assert_array_equal(found["frozen votes"], judged.right[:, 0])


def test_models_differ_by_their_draws_and_share_the_base(bench):
    cfg = rler.Config(**{**SMALL, "steps": 1})
    optimizer = train.adamw(1e-2)
    states, base = rl_smollm2.adapted(cfg, bench, jax.random.key(1), optimizer, 2)
    assert states.frozen is None
    assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(states.params))
    made = rl_smollm2.sampler(cfg, bench)(
        states, base, *bench.tokens(bench.pool[:2]), jax.random.split(jax.random.key(2)), 3
    )
    assert made.tokens.shape == (2, 6, bench.new_tokens)
    assert (made.tokens[0] != made.tokens[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize("module", [rler, rl_compose, rif_rft])
def test_an_experiment_runs_and_resumes(bench, monkeypatch, module):
    more = {rler: {}, rl_compose: {"compared": 4}, rif_rft: {"filter_rollouts": 2}}[module]
    cfg, folder = module.Config(**{**SMALL, "steps": 1}, **more), core.RunDir()
    result = module.run(cfg, folder)
    tables = result.tables()
    rows = {r["arm"]: r for r in tables["SmolLM2-135M"]}
    if module is rler:
        assert set(rows) == {*rler.ON_SMOLLM2, rler.SINGLE}
        assert len(tables["bias of the reward on held-out problems"]) == 5
        assert folder.chunks() == 5
    if module is rl_compose:
        assert set(rows) == {rl_compose.COMPARED[0], rl_compose.COMPARED[3]}
        assert [r["finite"] for r in tables["every legal combination"]] == ["yes"] * 32
    if module is rif_rft:
        assert tuple(rows) == rif_rft.ON_SMOLLM2
        assert rows["SFT"]["rollouts"] == 0
        assert rows["GRPO"]["rollouts"] == 2 * 8
        assert 2 * 8 * 2 <= rows["RIF-RFT"]["rollouts"] <= 2 * 8 * 2 + 2 * 8
    monkeypatch.setattr(rl_smollm2, "sampler", lambda cfg, bench: None)
    again = module.run(cfg, folder).tables()["SmolLM2-135M"]
    assert [str(r) for r in again] == [str(r) for r in tables["SmolLM2-135M"]]


@pytest.mark.parametrize("module", [asymmetric, lambda_grpo, rif_rft, ripo, rl_compose, rler])
def test_the_preset_is_a_small_run(module):
    cfg = module.PRESETS["smollm2"]
    assert (cfg.model, cfg.simulation_seeds, len(cfg.rates)) == ("smollm2", 0, 1)
    assert cfg.rollouts * cfg.steps <= 128


def test_another_model_is_refused():
    with pytest.raises(ConfigError, match="model: found 'large', expected tiny or smollm2"):
        lambda_grpo.Config(model="large")
