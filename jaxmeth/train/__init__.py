"""A small on-policy training loop as pure functions around one jitted ``train_step(state, batch)``.

Names are loaded on first use: the files and sinks are used by programs that must start before JAX is imported.
"""

import importlib

_WHERE = {
    "files": ("acquire_lock", "write_atomically"),
    "sinks": ("CsvSink", "fan_out", "tensorboard_sink", "trackio_sink", "wandb_sink"),
    "lora": ("LoRA", "is_lora", "join", "lora_init", "lora_merge", "split"),
    "rollout": ("Rollouts", "completion_logprobs", "sample_rollouts"),
    "loop": (
        "Objective",
        "PolicyBatch",
        "SFTBatch",
        "TrainState",
        "adamw",
        "make_train_step",
        "policy_batch",
        "policy_objective",
        "run",
        "sft_objective",
        "train_init",
    ),
    "checkpoint": ("latest", "restore", "save", "steps"),
    "mesh": ("batch_sharding", "make_mesh", "param_shardings"),
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str):
    if name in _WHERE:
        return importlib.import_module(f"jaxmeth.train.{name}")
    if name in _MODULES:
        return getattr(importlib.import_module(f"jaxmeth.train.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
