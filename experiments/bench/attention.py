"""Attention of one layer: dense causal and DHSA on this machine against torch's fused attention, interleaved.

One layer shaped like SmolLM2-135M (9 heads, 3 key/value heads, D 64), float32, the same two threads. Every round times
each call once, in turning order; medians are over the counted rounds. Selection is part of DHSA's time, and its output
is compared with masked dense attention. JAX's own dense attention runs up to 4096 tokens: it keeps the whole score
matrix. On an accelerator (no torch call is made there) the share of the roofline is printed instead.

    python -m experiments.bench.attention [--rounds 5] [--lengths 4096 8192 16384] [--long] [--model [8192 16384]]

``--model`` prefills the embedded SmolLM2-135M at 8192 tokens (or at each length given) with DHSA, blocked dense
attention and transformers: peak memory each in a process of its own, then times interleaved in one process; about ten
minutes on two cores. Beyond its 8192 positions the model's rotary embedding is scaled linearly, for speed alone, and
transformers is left out. An empty ``--lengths`` leaves the single layer out.
"""

import argparse
import dataclasses
import subprocess
import sys

import numpy as np

from experiments.timing import interleaved

HEADS, KV_HEADS, DIM = 9, 3, 64
# Dense peak of the arithmetic type used, in FLOP/s, by the name JAX gives the device.
PEAKS = {"NVIDIA H100": 495e12, "NVIDIA H200": 495e12, "TPU v5 lite": 197e12, "TPU v4": 275e12, "TPU v6 lite": 918e12}


def line(name: str, value: str, target: str, met: bool) -> bool:
    print(f"{name:<62} {value:>9}  target {target:<8} {'met' if met else 'NOT MET'}", flush=True)
    return met


def made(length: int):
    import jax.numpy as jnp

    rng = np.random.default_rng(length)
    return [jnp.asarray(rng.normal(size=(1, heads, length, DIM)), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def sparse(density: float):
    """``(q, k, v) -> out``: selection and attention."""
    import jax

    from jaxmeth.attention.dhsa_blocks import DHSAConfig, select_blocks
    from jaxmeth.kernels import block_attention

    cfg = DHSAConfig(density=density)

    def call(q, k, v):
        blocks = select_blocks(q, k, cfg)
        return block_attention(q, k, v, blocks.idx, blocks.count, bq=cfg.bq, bk=cfg.bk)

    return jax.jit(call)


def dense():
    """``(q, k, v) -> out``: causal dense attention through the blocked code."""
    import jax

    from jaxmeth.attention.dense import blocked

    return jax.jit(lambda q, k, v: blocked(q, k, v)[0])


def error(length: int, density: float) -> float:
    """The largest difference of DHSA's output from dense attention masked by the same lists, a row at a time."""
    import jax
    import jax.numpy as jnp

    from jaxmeth.attention.dhsa_blocks import DHSAConfig, dense_from_blocks, select_blocks

    cfg = DHSAConfig(density=density)
    q, k, v = made(length)
    listed = dense_from_blocks(select_blocks(q, k, cfg), length // cfg.bk)[0]

    @jax.jit
    def masked(q, k, v, listed):
        def row(i):
            queries = jax.lax.dynamic_slice_in_dim(q[0], i * cfg.bq, cfg.bq, axis=1).reshape(KV_HEADS, -1, DIM)
            s = jnp.einsum("htd,hsd->hts", queries, k[0], precision="highest") * DIM**-0.5
            slot = i * cfg.bq + jnp.tile(jnp.arange(cfg.bq), HEADS // KV_HEADS)
            seen = jnp.repeat(listed[:, i], cfg.bk, axis=-1)[:, None] & (jnp.arange(length) <= slot[:, None])[None]
            p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1)
            return jnp.einsum("hts,hsd->htd", p, v[0], precision="highest").reshape(HEADS, cfg.bq, DIM)

        return jnp.moveaxis(jax.lax.map(row, jnp.arange(length // cfg.bq)), 0, 1).reshape(1, HEADS, length, DIM)

    return float(jnp.max(jnp.abs(sparse(density)(q, k, v) - masked(q, k, v, listed))))


def one_length(length: int, rounds: int) -> list[bool]:
    import jax
    import jax.numpy as jnp

    q, k, v = made(length)
    # Multiplications and additions of the two products over what a query may see; DHSA's share of them is twice the
    # density but for the first rows.
    causal = 2 * length * length * HEADS * DIM
    functions = {"dense, blocked": (dense(), causal)}
    functions |= {f"DHSA at density 1/{n}": (sparse(1 / n), causal * (2 - 1 / n) / n) for n in (8, 16)}
    if length <= 4096:
        own = jax.jit(lambda *x: jax.nn.dot_product_attention(*(jnp.swapaxes(y, 1, 2) for y in x), is_causal=True))
        functions["dense, jax.nn"] = (own, causal)
    calls = {name: (lambda f=f: jax.block_until_ready(f(q, k, v))) for name, (f, _) in functions.items()}
    device = jax.devices()[0]
    if device.platform != "cpu":
        median = {name: float(np.median(t)) for name, t in interleaved(calls, rounds).items()}
        peak = next((value for name, value in PEAKS.items() if device.device_kind.startswith(name)), None)
        for name, seconds in median.items():
            rate = functions[name][1] / seconds
            share = f"unknown peak of {device.device_kind}" if peak is None else f"{rate / peak:.2f} of the roofline"
            print(f"{length:>6} {name:<30} {seconds * 1e3:9.2f} ms  {rate / 1e12:6.1f} TFLOP/s  {share}")
        return [accurate(length)]
    import torch

    torch.set_num_threads(2)
    wide = [torch.tensor(np.repeat(np.asarray(x), HEADS // x.shape[1], axis=1)) for x in (q, k, v)]

    def fused():
        with torch.inference_mode():
            torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)

    taken = interleaved({"torch, fused": fused} | calls, rounds)
    ratio = {name: float(np.median(taken["torch, fused"] / seconds)) for name, seconds in taken.items()}
    for name, seconds in taken.items():
        speed = f"torch's time over it {ratio[name]:6.2f}"
        print(f"{length:>6} {name:<30} {np.median(seconds) * 1e3:9.1f} ms  (min {seconds.min() * 1e3:.1f})  {speed}")
    over = 1 / ratio["dense, blocked"]
    met = [line(f"{length}: dense time over torch's", f"{over:.2f}x", "<= 1.25", over <= 1.25)]
    if length >= 8192:
        for n, target in ((8, 3.7), (16, 7.0)):
            got = ratio[f"DHSA at density 1/{n}"]
            name = f"{length}: torch's time over DHSA's at density 1/{n}"
            met.append(line(name, f"{got:.2f}x", f">= {target}", got >= target))
    return [*met, accurate(length)]


def accurate(length: int) -> bool:
    worst = max(error(length, 1 / n) for n in (8, 16))
    return line(f"{length}: DHSA's difference from masked dense attention", f"{worst:.1e}", "< 2e-6", worst < 2e-6)


def growth(rounds: int) -> bool:
    """The exponent of DHSA's time in the length at a fixed budget of 1024 keys, up to 64K."""
    import jax

    lengths = (8192, 16384, 32768, 65536)
    times = []
    for length in lengths:
        q, k, v = made(length)
        f = sparse(1024 / length)
        taken = interleaved({"one": lambda f=f, a=(q, k, v): jax.block_until_ready(f(*a))}, rounds)["one"]
        times.append(float(np.median(taken)))
        print(f"{length:>6} DHSA, 1024 keys a row {times[-1] * 1e3:22.1f} ms")
    exponent = float(np.polyfit(np.log(lengths), np.log(times), 1)[0])
    return line("exponent of the time in the length", f"{exponent:.3f}", "<= 1.15", exponent <= 1.15)


def stretched(cfg, length: int):
    """The model's configuration with room for ``length`` positions, the rotary embedding scaled linearly."""
    factor = length / cfg.max_positions
    if factor <= 1:
        return cfg
    ropes = tuple(dataclasses.replace(rope, kind="linear", factor=factor) for rope in cfg.ropes)
    return dataclasses.replace(cfg, max_positions=length, ropes=ropes)


def prefills(names: tuple[str, ...], length: int) -> dict:
    """Prefill of the embedded model, the logits of the last token, by "dense", "DHSA" and "transformers"."""
    calls = {}
    if "transformers" in names:
        from experiments.bench.model import transformers_model

        peer = transformers_model()
        if peer is None:
            raise SystemExit("--model: found no torch and transformers, expected both: pip install torch transformers")
        torch, theirs = peer
        ids = torch.tensor(np.random.default_rng(0).integers(0, 49152, (1, length)))

        def call():
            with torch.inference_mode():
                theirs(ids, use_cache=False, logits_to_keep=1)

        calls["transformers"] = call
    ours = [n for n in names if n != "transformers"]
    if ours:
        import jax
        import jax.numpy as jnp

        from jaxmeth import hf, models
        from jaxmeth.attention import dense, dhsa

        model = hf.default()
        cfg = stretched(model.cfg, length)
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, 49152, (1, length)), jnp.int32)
        for name in ours:
            attend = dense if name == "dense" else dhsa.attend(dhsa.DHSAConfig(density=1 / 8))
            last = jax.jit(lambda p, t, a=attend: models.apply(p, cfg, t, attend=a).hidden[:, -1])
            calls[name] = lambda f=last: jax.block_until_ready(f(model.params, tokens))
    return calls


# What a child runs to show its peak memory, its own alone.
CHILD = """
import sys
from experiments.bench.attention import prefills
from experiments.timing import peak_megabytes
prefills((sys.argv[1],), int(sys.argv[2]))[sys.argv[1]]()
print(peak_megabytes())
"""


def whole_model(rounds: int, length: int) -> None:
    names = ("transformers", "dense", "DHSA") if length <= 8192 else ("dense", "DHSA")
    memory = {}
    for name in names:
        done = subprocess.run([sys.executable, "-c", CHILD, name, str(length)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr.strip().splitlines()[-1])
        memory[name] = float(done.stdout)
        print(f"{length:>6} SmolLM2 prefill, {name:<14} {memory[name]:7.0f} MB peak", flush=True)
    taken = interleaved(prefills(names, length), rounds)
    for name, seconds in taken.items():
        gains = ", ".join(f"{np.median(taken[n] / seconds):.2f}x against {n}" for n in names if n != name)
        print(f"{length:>6} SmolLM2 prefill, {name:<14} {np.median(seconds):7.2f} s  {gains}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each call (default 5)")
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096, 8192, 16384], help="tokens")
    parser.add_argument("--long", action="store_true", help="also the growth up to 64K tokens")
    model = "also the whole SmolLM2-135M, at 8192 tokens or the lengths given"
    parser.add_argument("--model", type=int, nargs="*", help=model)
    options = parser.parse_args()
    met = [m for length in options.lengths for m in one_length(length, options.rounds)]
    if options.long:
        met.append(growth(options.rounds))
    for length in [] if options.model is None else options.model or [8192]:
        whole_model(min(3, options.rounds), length)
    raise SystemExit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
