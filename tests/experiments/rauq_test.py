"""The RAUQ experiment: its questions, its gathering against full attention maps, and a stored run of the same model."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import core, gathering, questions, rauq
from jaxmeth.errors import ConfigError

STORED = os.environ.get("JAXMETH_DATA")  # the plugin fixture takes it out of the environment


def test_built_questions_are_sound():
    items = questions.build()
    assert items == questions.build()
    assert len({i.id for i in items}) == len(items) >= 400
    shown = [i for i in items if i.split == "exemplar"]
    assert len(shown) == 8
    assert all(i.id.endswith("-000") for i in shown)
    assert not {i.question for i in shown} & {i.question for i in items if i.split == "test"}
    for item in items:
        assert all(item[:5])
        assert item.answer.lower() not in item.question.lower()
        words = questions.sentence(item)
        assert words.endswith(".")
        assert questions.correct(words, item.answer)
        assert words != item.answer
    assert ("What is the capital of France?", "Paris") in {(i.question, i.answer) for i in questions.build(1000)}


def test_the_prompt_format():
    items = [
        questions.Item("P36-000", "P36", "exemplar", "What is the capital of Kenya?", "Nairobi"),
        questions.Item("P36-001", "P36", "exemplar", "What is the capital of Ghana?", "Accra"),
        questions.Item("X-000", "X", "exemplar", "Who?", "Me", "It was me."),
        questions.Item("P36-002", "P36", "test", "What is the capital of Peru?", "Lima"),
    ]
    assert questions.prompt(items[3], questions.exemplars(items)) == (
        "Question: What is the capital of Kenya?\nAnswer: The capital of Kenya is Nairobi.\n"
        "Question: Who?\nAnswer: It was me.\nQuestion: What is the capital of Peru?\nAnswer:"
    )
    assert questions.correct("It is LIMA.", "Lima")


@pytest.mark.parametrize(
    ("text", "named"),
    [("id,relation,split,question\n", "answer"), ("id,relation,split,question,answer\na,b,test,,d\n", "line 2")],
)
def test_a_bad_question_file_is_named(tmp_path, text, named):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named) as raised:
        questions.read(path)
    assert "bad.csv" in str(raised.value)
    with pytest.raises(ConfigError, match=r"none\.csv"):
        questions.read(tmp_path / "none.csv")


def test_batches_hold_every_prompt_once_and_pad_on_the_left():
    ids = [list(range(1, n + 1)) for n in (5, 2, 9, 3, 8, 8, 1)]
    batches = gathering.batches(ids, batch=3, pad=4)
    assert sorted(r for b in batches for r in b.rows) == list(range(7))
    assert [b.tokens.shape for b in batches] == [(3, 4), (3, 8), (3, 12)]
    for b in batches:
        for row, tokens, mask in zip(b.rows, b.tokens, b.mask, strict=False):
            assert tokens[mask].tolist() == ids[row]
            assert mask[-1]
            assert not np.diff(mask.astype(int)).min(initial=0) < 0


def test_gathering_equals_full_attention_maps():
    """The observer's slices, left-padded and inside the loop, against maps of one teacher-forced pass a row."""
    import jax
    import jax.numpy as jnp

    from jaxmeth import models
    from jaxmeth import uncertainty as unc

    cfg = models.DecoderConfig("llama", 61, 32, 3, 4, 2, 8, 64, 64)
    params = jax.tree.map(lambda p: 4 * p, models.init(cfg, jax.random.key(0)))
    new, length, layers = 6, 7, (1, 2)
    lengths = (7, 4)
    prompts = np.asarray(jax.random.randint(jax.random.key(1), (2, length), 0, 61), np.int32)
    mask = np.arange(length)[None] >= length - np.array(lengths)[:, None]
    stop = np.array([60], np.int32)
    attend, observe, start = gathering.gatherer(cfg, layers, stop, new)
    state, carry = start(2, length)
    out = models.generate(
        params, cfg, prompts, mask, key=jax.random.key(2), max_new_tokens=new, attend=attend, state=state,
        observe=observe, carry=carry,
    )  # fmt: skip
    assert out.lengths.tolist() == [new, new]

    def maps(q, k, v, ctx, state):
        grouped = jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)
        scores = jnp.where(ctx.mask(), jnp.einsum("bhtd,bhsd->bhts", q, grouped) * ctx.scale, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        return jnp.einsum("bhts,bhsd->bhtd", weights, jnp.repeat(v, q.shape[1] // k.shape[1], axis=1)), weights

    for b, m in enumerate(lengths):
        tokens = jnp.asarray(np.concatenate([prompts[b][mask[b]], np.asarray(out.tokens[b])]))[None]
        total = tokens.shape[1]
        full = models.apply(params, cfg, tokens, attend=maps, state=jnp.zeros((3, 1, 4, total, total)))
        attn = jnp.moveaxis(full.state, 0, 1)
        expected = unc.previous_token_attention(attn[:, layers, :], jnp.array([m]), jnp.array([new]), new)
        np.testing.assert_allclose(out.carry.prev_attn[b, ..., 1:], expected[0], atol=2e-6)
        top = np.asarray(attn[0].max((0, 1)))
        for i in range(1, new):
            np.testing.assert_allclose(out.carry.answer_attn[b, i, :i], top[m + i - 1, m : m + i], atol=2e-6)
        logp, entropy = unc.token_signals(full.logits[:, m - 1 : -1], tokens[:, m:])
        ours = rauq.all_scores(
            out.logprobs, out.entropy, out.carry.prev_attn[..., 1:], out.carry.answer_attn, out.lengths, 61, 0
        )
        config = unc.RAUQConfig(alpha=0.9, signal="entropy")
        n = jnp.array([new])
        entropic = unc.rauq(logp, expected, n, entropy=entropy, vocab_size=61, layers=(0, 1), config=config)
        wanted = {
            "rauq_prob_a0.2": unc.rauq(logp, expected, n, layers=(0, 1)).score[0],
            "rauq_entropy_a0.9": entropic.score[0],
            "perplexity": -logp.mean(),
            "msp": -logp.sum(),
            "mean_entropy": entropy.mean(),
            "attention_score": -jnp.log(expected[0, 0]).sum(1).mean(),
            "simple_focus": unc.simple_focus(logp, jnp.asarray(top)[None, m - 1 : -1, m:], n)[0],
        }
        named = dict(zip(rauq.SCORES, np.asarray(ours[b]), strict=True))
        assert {k: named[k] for k in wanted} == pytest.approx({k: float(v) for k, v in wanted.items()}, rel=2e-5)
    online = jax.vmap(lambda s: unc.rauq_finalize(s, layers=(0, 1)).score)(out.carry.online)
    np.testing.assert_allclose(online, ours[:, 0], rtol=1e-5)


def test_comparison_ranks_and_pairs():
    rng = np.random.default_rng(0)
    right = rng.random(200) < 0.5
    scores = rng.normal(size=(200, len(rauq.SCORES))).astype(np.float32)
    scores[:, 0] = np.where(right, -1, 1)  # a perfect RAUQ against noise
    answers = rauq.Answers([""] * 200, np.ones(200, int), scores, 1e-3)
    rows, claims = rauq._compare(rauq.Config(resamples=200), answers, right)
    assert rows[0]["score"] == "rauq_prob_a0.2"
    assert rows[0]["PRR@0.5"].value == pytest.approx(1)
    assert rows[0]["ROC-AUC"].value == pytest.approx(1)
    base = rows[rauq.SCORES.index("perplexity")]
    assert base["PRR@0.5 - perplexity"] == core.Estimate(0, 0, 0)
    assert rows[0]["PRR@0.5 - perplexity"].value == pytest.approx(1 - base["PRR@0.5"].value, abs=1e-5)
    assert [c.holds for c in claims] == ["yes", "undecided", "no"]


def test_spearman_is_scipys():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, 50), rng.normal(size=50)
    assert rauq.spearman(x, x + 0.1 * y) == pytest.approx(spearmanr(x, x + 0.1 * y)[0])


def test_paper_preset_without_weights_checks_shapes():
    result = rauq.run(rauq.PRESETS["paper"])
    rows = {r["array"]: r for r in result.rows}
    assert rows["parameters"]["numbers"] == 8_030_261_248
    assert rows["prev_attn"]["shape"] == "[64, 13, 32, 64]"
    assert rows["scores"]["shape"] == f"[64, {len(rauq.SCORES)}]"
    assert not list(result.claims)


def _run_alone(*options):
    """As a user would: in a process without the tests' checks of shapes and keys, which cost minutes here."""
    words = [sys.executable, "-m", "experiments", "run", "rauq", *map(str, options)]
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_stored_run_of_smollm2_is_reproduced(tmp_path, golden):
    """The 120 stored answers; where real questions are at hand, as the exemplars and questions are theirs."""
    if not STORED:
        _run_alone("--preset", "smoke", "--items", 8, "--out", tmp_path)
        assert list((tmp_path / "rauq").glob("*/figures/risk_coverage.png"))
        return
    with open(golden / "12-rauq" / "smollm2_scores.csv", newline="") as file:
        stored = [row["item_id"] for row in csv.DictReader(file)]
    source = Path(STORED) / "12-rauq"
    with open(source / "factual_qa.csv", encoding="utf-8", newline="") as file:
        rows = [r for r in csv.reader(file) if r[0] in stored or r[2] in ("exemplar", "split")]
    (tmp_path / "12-rauq").mkdir()
    with open(tmp_path / "12-rauq" / "factual_qa.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    (tmp_path / "12-rauq" / "smollm2_scores.csv").write_bytes((golden / "12-rauq" / "smollm2_scores.csv").read_bytes())
    _run_alone("--data", tmp_path, "--out", tmp_path / "out", "--batch", 30)
    (path,) = (tmp_path / "out" / "rauq").glob("*/result.json")
    result = json.loads(path.read_text())
    reference = {r["score"]: r for r in result["tables"]["stored reference scores"]}
    assert len(stored) == 120
    assert reference["rauq_prob_a0.2"]["answers"] == 120
    assert reference["rauq_prob_a0.2"]["same"] >= 0.98
    assert reference["rauq_prob_a0.2"]["rank correlation"] >= 0.99
    verdicts = {c["statement"]: c["holds"] for c in result["claims"]}
    assert [v for k, v in verdicts.items() if "stored" in k] == ["yes", "yes"]
