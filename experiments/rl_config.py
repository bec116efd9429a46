"""The options that all reinforcement-learning experiments share. Nothing here imports JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import core, rl_tasks
from jaxmeth.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Training(core.Config):
    """A task, a model, a warm start, and on-policy training that every arm of an experiment goes through alike."""

    task: str = "chain_sum"
    """chain_sum, letter_counting, spell_backward, countdown, or mixed."""
    terms: int = 3
    """Numbers in a sum."""
    digits: int = 1
    """Most digits of a number in a sum."""
    running_sums: bool = True
    """Sums are answered with every intermediate sum; the last one counts."""
    width: int = 64
    """Of the tiny model, of 85 thousand parameters; 160 with 4 layers makes one million."""
    layers: int = 2
    """Of the tiny model."""
    warm_steps: int = 500
    """Supervised steps before, once a seed, shared by all arms."""
    warm_batch: int = 64
    """Problems a supervised step."""
    warm_errors: float = 0.4
    """Share of wrong answers (other problems' ones) in the last eighth of the supervised steps: what is unlearnt."""
    warm_rate: float = 3e-3
    """Highest learning rate of the supervised steps."""
    rollouts: int = 128
    """Answers sampled a training step."""
    group_size: int = 8
    """Answers a prompt; divides the rollouts."""
    steps: int = 60
    """Batches of rollouts that an arm trains on."""
    epochs: int = 1
    """Updates on each batch; from the second on the ratio of probabilities matters."""
    rates: tuple[float, ...] = (3e-5, 1e-4, 3e-4, 1e-3)
    """Learning rates tried by each arm, on seeds of their own."""
    max_grad_norm: float = 1.0
    """Bound of the gradient's norm."""
    temperature: float = 1.0
    """Of sampling, in training and in evaluation."""
    train_problems: int = 1024
    """Distinct problems to train on."""
    test_problems: int = 128
    """Held-out problems of every evaluation."""
    test_samples: int = 4
    """Answers to each of them."""
    evaluations: int = 4
    """Times that an arm is evaluated after training has begun; divides the steps."""
    seeds: int = 8
    """Seeds that are reported, trained in one vectorised call."""
    selection_seeds: int = 2
    """Other seeds, on which each arm's learning rate is chosen."""
    simulation_seeds: int = 8
    """Seeds of the simulation that comes before the training, where an experiment has one; 0 leaves it out."""
    model: str = "tiny"
    """tiny, a character model trained here, or smollm2, SmolLM2-135M-Instruct with LoRA (--preset smollm2)."""
    data: Path | None = None
    """Folder of real extracts (else JAXMETH_DATA) to take the problems from; without one they are made."""
    shapes_only: bool = False
    """Only check that the paper's setting fits together: shapes, nothing computed."""

    def __post_init__(self):
        super().__post_init__()
        allowed = (*rl_tasks.TASKS, "mixed")
        if self.task not in allowed:
            raise ConfigError(f"task: found {self.task!r}, expected one of {', '.join(allowed)}")
        if self.model not in ("tiny", "smollm2"):
            raise ConfigError(f"model: found {self.model!r}, expected tiny or smollm2")
        self.require(
            terms=(2, 6), digits=(1, 3), width=(8, None), layers=(1, None), warm_steps=(0, None), warm_batch=(1, None),
            warm_rate=(1e-9, 1), warm_errors=(0, 1), rollouts=(1, None), group_size=(1, None), steps=(1, None),
            epochs=(1, None), rates=(1e-9, 1), max_grad_norm=(1e-9, None), temperature=(1e-3, 100),
            train_problems=(1, None), test_problems=(1, None), test_samples=(1, None), evaluations=(1, None),
            seeds=(1, None), selection_seeds=(1, None), simulation_seeds=(0, None),
        )  # fmt: skip
        if not self.rates:
            raise ConfigError("rates: found none, expected at least 1 learning rate")
        if self.width % 16 and self.width != 8:
            raise ConfigError(f"width: found {self.width}, expected 8 or a multiple of 16")
        for name, whole in (("group_size", "rollouts"), ("evaluations", "steps")):
            part, total = getattr(self, name), getattr(self, whole)
            if total % part:
                raise ConfigError(f"{name}: found {part}, expected a divisor of {whole} {total}")
        widest = rl_tasks.widest(self.terms, self.digits, self.running_sums)
        most = rl_tasks.PROMPT, rl_tasks.ANSWER - 1
        if self.model == "tiny" and (widest[0] > most[0] or widest[1] > most[1]):
            found = f"terms {self.terms} with digits {self.digits}, up to {widest[0]} characters of a sum"
            found += f" and {widest[1]} of its answer{', running sums included' * self.running_sums}"
            raise ConfigError(f"terms: found {found}, expected at most {most[0]} and {most[1]}")
        if self.rollouts // self.group_size > self.train_problems:
            asked = self.rollouts // self.group_size
            raise ConfigError(
                f"train_problems: found {self.train_problems}, expected at least {asked}, a step's prompts"
            )

    def trained(self, arms: Sequence[Any], on_smollm2: Sequence[str]) -> tuple[list[Any], list[str]]:
        """The arms that the model trains, all or on SmolLM2 the named ones, and a note of those left out."""
        if self.model == "tiny":
            return list(arms), []
        left_out = ", ".join(a.name for a in arms if a.name not in on_smollm2)
        notes = [f"Not trained on SmolLM2, to save time: {left_out}."] if left_out else []
        return [a for a in arms if a.name in on_smollm2], notes

    @property
    def prompts(self) -> int:
        """Prompts a training step."""
        return self.rollouts // self.group_size


TINY = {
    "terms": 2, "width": 16, "layers": 1, "warm_steps": 300, "warm_errors": 0.0, "rollouts": 32, "steps": 4,
    "evaluations": 2, "rates": (1e-3, 3e-3), "train_problems": 64, "test_problems": 16, "test_samples": 2, "seeds": 2,
    "selection_seeds": 1, "simulation_seeds": 2,
}  # fmt: skip
"""What a smoke preset changes: the same code in seconds."""

SMOLLM2 = {
    "model": "smollm2", "terms": 2, "rollouts": 16, "steps": 4, "evaluations": 1, "rates": (1e-3,),
    "train_problems": 48, "test_problems": 16, "test_samples": 4, "seeds": 2, "selection_seeds": 1,
    "simulation_seeds": 0,
}  # fmt: skip
"""What a smollm2 preset changes: the arms on SmolLM2-135M-Instruct in minutes, the simulations left out."""
