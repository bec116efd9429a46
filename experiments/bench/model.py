"""Speed of the decoder, of generation and of RAUQ inside it, against torch and transformers, interleaved.

``python -m experiments.bench.model [--rounds 7]``, two threads, float32, the embedded SmolLM2-135M-Instruct. Needs
``pip install torch==2.13.0 transformers`` beside the laptop packages; without them the peers' rows are left out.

Targets: forward at 512 tokens <= 1.1x torch's time; greedy decoding >= 1.5x transformers' tokens a second and >= 70 %
of the rate that the memory bandwidth allows (bytes of weights a token over the bandwidth that one float32
matrix-vector product of the same total size reaches in the same run); RAUQ inside generation < 2 % of the time;
``apply`` on a tiny model < 1 ms a call; importing jaxmeth < 0.5 s on top of jax and flax; ``--help`` < 3 s; GGUF
conversion < 20 s with peak memory < 2.5x the float32 size. Medians of rounds taken in turns; exit code 1 where a
target is missed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

from experiments.timing import interleaved

PROMPT, NEW = 64, 64


def line(name: str, value: float, unit: str, target: str, met: bool) -> bool:
    print(f"{name:<58} {value:9.3f} {unit:<9} target {target:<8} {'ok' if met else 'MISSED'}", flush=True)
    return met


def transformers_model():
    """The same weights in transformers, or None without the packages."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    from jaxmeth.hf.load import DEFAULT_NAME, cache_folder

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(cache_folder() / DEFAULT_NAME, dtype=torch.float32)
    return torch, model.eval()


def speed_of_the_model(rounds: int) -> list[bool]:
    import jax
    import jax.numpy as jnp

    from jaxmeth import hf, models, uncertainty
    from jaxmeth.attention import dense

    checkpoint = hf.default()
    cfg, params = checkpoint.cfg, checkpoint.params
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (1, 512)).astype(np.int32)
    prompt, mask = tokens[:, :PROMPT], np.ones((1, PROMPT), bool)
    key = jax.random.key(0)
    weights = jnp.ones((size // 4 // cfg.hidden_size, cfg.hidden_size), jnp.float32)
    vector = jnp.ones((cfg.hidden_size,), jnp.float32)
    product = jax.jit(lambda w, x: w @ x)
    tap, heads = uncertainty.rauq_tap(dense), (cfg.num_layers, cfg.num_heads)

    def observe(carry, info):
        attention = jnp.moveaxis(info.state[1], 0, 1)
        return jax.vmap(uncertainty.rauq_step)(carry, info.logprob, attention, info.active), jnp.zeros((1,), bool)

    scored = {
        "attend": tap,
        "state": uncertainty.rauq_tap_init(None, heads[0], 1, heads[1]),
        "observe": observe,
        "carry": jax.tree.map(lambda a: a[None], uncertainty.rauq_init(*heads)),
    }

    def generate(new: int, **kwargs):
        jax.block_until_ready(models.generate(params, cfg, prompt, mask, key=key, max_new_tokens=new, **kwargs).tokens)

    calls = {
        "forward": lambda: jax.block_until_ready(models.apply(params, cfg, tokens).logits),
        "prefill": lambda: generate(1),
        "greedy": lambda: generate(NEW),
        "scored": lambda: generate(NEW, **scored),
        "bandwidth": lambda: jax.block_until_ready(product(weights, vector)),
    }
    peer = transformers_model()
    if peer is not None:
        torch, theirs = peer
        ids = torch.tensor(tokens, dtype=torch.long)

        def torch_forward():
            with torch.inference_mode():
                theirs(ids, use_cache=False)

        def torch_generate(new: int):
            with torch.inference_mode():
                theirs.generate(
                    ids[:, :PROMPT], attention_mask=torch.ones((1, PROMPT), dtype=torch.long), do_sample=False,
                    min_new_tokens=new, max_new_tokens=new, pad_token_id=0,
                )  # fmt: skip

        calls |= {"torch forward": torch_forward, "transformers greedy": lambda: torch_generate(NEW)}
    taken = interleaved(calls, rounds)
    median = {name: float(np.median(values)) for name, values in taken.items()}
    for name, value in median.items():
        print(f"{name:<58} {value * 1e3:9.1f} ms        (min {taken[name].min() * 1e3:.1f})")
    met = []
    if peer is not None:
        ratio = float(np.median(taken["forward"] / taken["torch forward"]))
        met.append(line("forward at 512 tokens, time over torch's", ratio, "x", "<= 1.1", ratio <= 1.1))
        ratio = float(np.median(taken["transformers greedy"] / taken["greedy"]))
        met.append(line("greedy decoding, tokens/s over transformers'", ratio, "x", ">= 1.5", ratio >= 1.5))
    step = float(np.median((taken["greedy"] - taken["prefill"]) / (NEW - 1)))
    print(f"{'decoding':<58} {1 / step:9.1f} tokens/s")
    share = float(np.median(taken["bandwidth"] / ((taken["greedy"] - taken["prefill"]) / (NEW - 1))))
    met.append(line("share of the rate the memory bandwidth allows", share, "", ">= 0.70", share >= 0.70))
    extra = float(np.median(taken["scored"] / taken["greedy"])) - 1
    met.append(line("time RAUQ adds inside generation", extra * 100, "%", "< 2", extra < 0.02))

    tiny = models.DecoderConfig("llama", 96, 32, 2, 4, 2, 8, 48, 64)
    small, few = models.init(tiny, key), jnp.ones((1, 8), jnp.int32)
    calls = {"apply": lambda: [models.apply(small, tiny, few) for _ in range(100)]}
    call = float(np.median(interleaved(calls, rounds)["apply"])) / 100
    return [*met, line("apply on a tiny model, a call", call * 1e3, "ms", "< 1", call < 1e-3)]


def processor_seconds(*command: str, **environment: str) -> tuple[float, float, float]:
    """Wall seconds, processor seconds and peak megabytes of one child process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: exit status {status}")
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def speed_of_processes(rounds: int) -> list[bool]:
    base = "import jax, flax.nnx"
    ours = base + "; import jaxmeth; from jaxmeth import models, hf, uncertainty; hf.load"
    pairs = [
        [processor_seconds(sys.executable, "-c", code)[1] for code in (base, "import jaxmeth", ours)]
        for _ in range(rounds)
    ]
    bare, package, whole = np.median(np.array(pairs), axis=0)
    print(f"{'import jax, flax':<58} {bare:9.3f} s")
    met = [line("importing jaxmeth alone", package, "s", "< 0.5", package < 0.5)]
    added = float(whole - bare)
    met.append(line("models, hf and uncertainty on top of jax and flax", added, "s", "< 0.5", added < 0.5))
    for command in (("experiments",), ("experiments", "run", "rauq", "--help"), ("jaxmeth.hf", "--help")):
        used = float(np.median([processor_seconds(sys.executable, "-m", *command)[1] for _ in range(rounds)]))
        met.append(line(f"python -m {' '.join(command)}", used, "s", "< 3", used < 3))
    with tempfile.TemporaryDirectory() as folder:
        code = "from jaxmeth import hf; hf.default()"
        wall, _, peak = processor_seconds(sys.executable, "-c", code, JAXMETH_CACHE=folder)
        size = sum(os.path.getsize(os.path.join(at, f)) for at, _, files in os.walk(folder) for f in files) / 2**20
    met.append(line("GGUF conversion, wall", wall, "s", "< 20", wall < 20))
    return [*met, line("GGUF conversion, peak over float32 size", peak / size, "x", "< 2.5", peak / size < 2.5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds of each call (default 7)")
    rounds = parser.parse_args().rounds
    met = speed_of_processes(min(rounds, 5)) + speed_of_the_model(rounds)
    raise SystemExit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
