"""Attention of one layer: dense causal and DHSA on this machine against torch's fused attention, interleaved.

One layer shaped like SmolLM2-135M (9 heads, 3 key/value heads, D 64), float32, the same two threads. Every round times
each call once, in turning order; medians are over the counted rounds. Selection is part of DHSA's time. On an
accelerator (no torch call is made there) it prints the share of the roofline that the arithmetic rate allows instead.

    python -m experiments.bench.attention [--rounds 5] [--lengths 4096 8192 16384] [--long]
"""

import argparse
import time

import numpy as np

HEADS, KV_HEADS, DIM = 9, 3, 64
# Dense peak of the arithmetic type used, in FLOP/s, by the name JAX gives the device.
PEAKS = {"NVIDIA H100": 495e12, "NVIDIA H200": 495e12, "TPU v5 lite": 197e12, "TPU v4": 275e12, "TPU v6 lite": 918e12}


def interleaved(calls: dict, rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each call in each counted round, after one uncounted; the first call turns with the rounds."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for round in range(rounds + 1):
        for name in names[round % len(names) :] + names[: round % len(names)]:
            start = time.perf_counter()
            calls[name]()
            if round:
                taken[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in taken.items()}


def line(name: str, value: float, target: str, met: bool) -> bool:
    print(f"{name:<62} {value:8.2f}x  target {target:<8} {'met' if met else 'NOT MET'}")
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


def one_length(length: int, rounds: int) -> list[bool]:
    import jax

    q, k, v = made(length)
    functions = {"dense, blocked": dense()}
    functions |= {f"DHSA at density 1/{n}": sparse(1 / n) for n in (8, 16)}
    calls = {name: (lambda f=f: jax.block_until_ready(f(q, k, v))) for name, f in functions.items()}
    flops = 2 * length * length * HEADS * DIM
    device = jax.devices()[0]
    if device.platform != "cpu":
        median = {name: float(np.median(t)) for name, t in interleaved(calls, rounds).items()}
        peak = next((value for name, value in PEAKS.items() if device.device_kind.startswith(name)), None)
        for name, seconds in median.items():
            rate = flops / seconds
            share = "unknown peak" if peak is None or name != "dense, blocked" else f"{rate / peak:.2f} of the roofline"
            print(f"{length:>6} {name:<30} {seconds * 1e3:9.2f} ms  {share}")
        return []
    import torch

    torch.set_num_threads(2)
    wide = [torch.tensor(np.repeat(np.asarray(x), HEADS // x.shape[1], axis=1)) for x in (q, k, v)]

    def fused():
        with torch.inference_mode():
            torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)

    taken = interleaved({"torch, fused": fused} | calls, rounds)
    for name, seconds in taken.items():
        print(f"{length:>6} {name:<30} {np.median(seconds) * 1e3:9.1f} ms  (min {seconds.min() * 1e3:.1f})")
    met = []
    ratio = {name: float(np.median(taken["torch, fused"] / seconds)) for name, seconds in taken.items()}
    met.append(
        line(
            f"{length}: dense time over torch's", 1 / ratio["dense, blocked"], "<= 1.25", ratio["dense, blocked"] >= 0.8
        )
    )
    if length >= 8192:
        for n, target in ((8, 3.7), (16, 7.0)):
            got = ratio[f"DHSA at density 1/{n}"]
            met.append(line(f"{length}: torch's time over DHSA's at density 1/{n}", got, f">= {target}", got >= target))
    return met


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
    return line("exponent of the time in the length", exponent, "<= 1.15", exponent <= 1.15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each call (default 5)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384], help="tokens")
    parser.add_argument("--long", action="store_true", help="also the growth up to 64K tokens")
    options = parser.parse_args()
    met = [m for length in options.lengths for m in one_length(length, options.rounds)]
    if options.long:
        met.append(growth(options.rounds))
    raise SystemExit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
