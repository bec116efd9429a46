"""Speed of ordering, rotating and rounding.

``python -m experiments.bench.quant [--quick]``. Targets on two cores: MassDiff at d = 8192, blocks of 32, at least 50
times the loop that carries whole token vectors (how the public code works; numpy here) with equal orders; block
rotation within 1.2 times the better of one product and the butterfly at each size. Exit code 1 where one is missed.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np


def token_loop(x: np.ndarray, block: int) -> np.ndarray:
    """The public code's way: every block holds its summed token vector; the mean is taken at each step."""
    size = np.abs(x)
    order = np.argsort(-size.mean(0), kind="stable")
    n = x.shape[1] // block
    members = [[i] for i in order[:n]]
    held = size[:, order[:n]].T.copy()
    full = np.zeros(n, bool)
    for i in order[n:]:
        j = int(np.where(full, np.inf, (held + size[:, i][None]).mean(1)).argmin())
        members[j].append(i)
        held[j] += size[:, i]
        full[j] = len(members[j]) == block
    return np.concatenate(members)


def seconds(run: Callable[[], object], rounds: int) -> float:
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def ordering(quick: bool) -> bool:
    import jax

    from jaxmeth import quant

    d, tokens = (512, 64) if quick else (8192, 2048)
    x = np.random.default_rng(0).standard_t(3, (tokens, d)).astype(np.float32)
    find = jax.jit(lambda x: quant.massdiff(quant.channel_mass(x), 32))
    device = jax.numpy.asarray(x)
    ours = seconds(lambda: jax.block_until_ready(find(device)), 5)
    start = time.perf_counter()
    expected = token_loop(x, 32)
    theirs = time.perf_counter() - start
    same = np.array_equal(find(device), expected)
    met = theirs / ours >= 50 and same
    print(
        f"MassDiff, d={d}, b=32, {tokens} tokens: {ours * 1e3:.1f} ms, token loop {theirs * 1e3:.0f} ms, "
        f"{theirs / ours:.0f}x (target 50x), orders {'equal' if same else 'DIFFER'}{'' if met else ' MISSED'}",
        flush=True,
    )
    return met


def rotating(quick: bool) -> bool:
    import jax

    from jaxmeth.quant.hadamard import block_hadamard, by_butterfly, by_matmul

    tokens, d, rounds = (64, 1024, 3) if quick else (512, 8192, 7)
    x = jax.random.normal(jax.random.key(0), (tokens, d))
    met = True
    for block in (16, 64, 256, 1024) if quick else (16, 32, 64, 128, 256, 512, 1024, 2048):
        forms = [jax.jit(f, static_argnums=1) for f in (block_hadamard, by_matmul, by_butterfly)]
        ours, matmul, butterfly = (seconds(lambda f=f, b=block: jax.block_until_ready(f(x, b)), rounds) for f in forms)
        ratio = ours / min(matmul, butterfly)
        met &= ratio <= 1.2
        print(
            f"rotation of {tokens} x {d}, b={block}: {ours * 1e3:.1f} ms, product {matmul * 1e3:.1f}, butterfly "
            f"{butterfly * 1e3:.1f}, {ratio:.2f} of the better (target 1.2){'' if ratio <= 1.2 else ' MISSED'}",
            flush=True,
        )
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it runs, not how fast")
    quick = parser.parse_args().quick
    met = ordering(quick) & rotating(quick)
    raise SystemExit(0 if met else 1)


if __name__ == "__main__":
    main()
