"""Speed of risk control against numpy loops and MAPIE, interleaved.

``python -m experiments.bench.risk [--quick]``. Targets on two cores: calibration of 50,000 lower schedules on 1,000
trajectories of 24 checkpoints at least 50 times numpy loops in the style of the authors' code, without an [n, m, T]
array; fixed-sequence testing of 10,000 rows of 1,000 p-values at least 10 times MAPIE (``pip install mapie``; that
part is left out without it). Exit code 1 where a target is missed.
"""

import argparse
from collections.abc import Callable

import numpy as np

from experiments.timing import interleaved, peak_megabytes


def numpy_lower_search(
    signal, correct, length, tokens, c, shift, lo, hi, budget, eps, delta, warmup=200.0
) -> tuple[int, np.ndarray]:
    """The authors' way: a Python loop over trajectories, all candidates of one at once in float64."""
    m = len(c)
    risk, cost = np.zeros(m), np.zeros(m)
    for i in range(len(length)):
        n = length[i]
        used, y, z = tokens[i, :n].astype(np.float64), signal[i, :n].astype(np.float64), correct[i, :n]
        threshold = lo[:, None] + (hi - lo)[:, None] / (
            1 + np.exp(-c[:, None] * (used[None] - (shift * budget)[:, None]))
        )
        threshold = np.where(used[None] < warmup, -1.0, threshold)
        fires = y[None] <= threshold
        exits = np.where(fires.any(1), fires.argmax(1), n - 1)
        ahead = np.cumsum(z[::-1])[::-1] / (n - np.arange(n))
        ahead[-1] = 0.0
        risk += ahead[exits]
        cost += np.cumsum(~z)[exits] / n
    risk, cost = risk / len(length), cost / len(length)
    admissible = risk + np.sqrt(np.log(1 / delta) / (2 * len(length))) <= eps
    return (int(np.where(admissible, cost, np.inf).argmin()) if admissible.any() else -1), risk


def medians(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median seconds of each, taken in turns."""
    times = interleaved({"first": first, "second": second}, rounds, uncounted=0)
    return float(np.median(times["first"])), float(np.median(times["second"]))


def report(name: str, ours: float, theirs: float, target: float) -> bool:
    ratio = theirs / ours
    met = ratio >= target
    wanted = f" (target {target:.0f}x)" if target else ""
    print(f"{name}: {ours * 1e3:.1f} ms, peer {theirs * 1e3:.0f} ms, {ratio:.2g}x{wanted}", end="")
    print("" if met else " MISSED", flush=True)
    return met


def lower_search(quick: bool, ragged: bool) -> bool:
    import jax
    import jax.numpy as jnp

    from experiments.trajectories import simulate
    from jaxmeth.risk import budget, select

    n, rounds = (100, 1) if quick else (1000, 3)
    signal, correct, length, tokens = jax.jit(simulate, static_argnums=1)(jax.random.key(0), n)
    if not ragged:
        length = jnp.full_like(length, 24)
    grid = [jnp.linspace(0, 0.01, 100), jnp.linspace(0, 1, 25), jnp.linspace(-2, 0, 20), jnp.asarray([0.9995])]
    params = budget.lower_grid(*grid)
    total = 3600.0
    host = [np.asarray(value) for value in (signal, correct, length, tokens, *params)]

    def calibrated(levels):
        summary = budget.lower_summary(signal, correct, length, tokens, params, total, levels=levels)
        return jax.block_until_ready((select(summary, 0.2, 0.1, "hoeffding", "pointwise"), summary))

    chosen, expected = numpy_lower_search(*host, total, 0.2, 0.1)
    found, summary = calibrated(20)
    rhat = np.asarray(summary.total) / n
    # Float32 and float64 may differ on a near-tie of one trajectory.
    if np.abs(rhat - expected).max() > 2.0 / n or (chosen == -1) == bool(found.feasible):
        raise AssertionError(f"the searches disagree: {found}, {chosen}, {np.abs(rhat - expected).max()}")
    met = True
    for levels, name in ((20, "as a grid"), (1, "as unrelated rows")):
        calibrated(levels)
        ours, theirs = medians(
            lambda levels=levels: calibrated(levels), lambda: numpy_lower_search(*host, total, 0.2, 0.1), rounds
        )
        met &= report(
            f"lower search, n={n}, T={'8 to ' * ragged}24, m=50,000 {name}", ours, theirs, 50 if levels > 1 else 1
        )
    peak = peak_megabytes() / 1024
    print(
        f"peak memory of the process {peak:.2f} GiB; "
        f"an [n, m, T] float32 array would be {n * 50_000 * 24 * 4 / 2**30:.1f} GiB"
    )
    return met


def against_mapie(quick: bool) -> bool:
    try:
        from mapie.risk_control.fwer_control import control_fwer
        from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value
    except ImportError:
        print("MAPIE is not installed: its part is left out")
        return True
    import jax
    import jax.numpy as jnp

    from jaxmeth import risk

    rows, m = (200 if quick else 10_000), 1000
    rng = np.random.default_rng(0)
    # Sorted towards the strictest, with the first failure anywhere.
    pvalues = np.sort(rng.uniform(0, 0.2, (rows, m)).astype(np.float32), axis=1)[:, ::-1]
    device = jnp.asarray(pvalues)
    reject = jax.jit(risk.fixed_sequence)

    def mapie():
        return [control_fwer(row[::-1], 0.1, "fixed_sequence") for row in pvalues]

    found = np.asarray(reject(device, 0.1))
    for row, rejected in zip(found[:50], mapie()[:50], strict=True):
        np.testing.assert_array_equal(np.flatnonzero(row[::-1]), rejected)
    ours, theirs = medians(lambda: jax.block_until_ready(reject(device, 0.1)), mapie, 1 if quick else 3)
    met = report(f"fixed-sequence test of {rows:,} x {m:,} p-values", ours, theirs, 10)

    losses = (rng.uniform(size=(10_000, m)) < np.linspace(0.4, 0.01, m)[None]).astype(np.float32)
    device = jnp.asarray(losses)
    cost = jnp.broadcast_to(jnp.arange(float(m))[None], losses.shape)

    def calibrated():
        return jax.block_until_ready(risk.calibrate(device, cost, 0.1, 0.1, "hoeffding_bentkus"))

    def mapie_losses():
        pvalue = compute_hoeffding_bentkus_p_value(losses.mean(0, dtype=np.float64), 10_000, 0.1)[:, 0]
        return control_fwer(pvalue[::-1], 0.1, "fixed_sequence")

    if int(calibrated().index) != m - 1 - mapie_losses()[-1]:
        raise AssertionError("the selections disagree")
    ours, theirs = medians(calibrated, mapie_losses, 3 if quick else 15)
    report(f"one calibration from 10,000 x {m:,} losses", ours, theirs, 0)
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it runs, not how fast")
    quick = parser.parse_args().quick
    met = lower_search(quick, False) & lower_search(quick, True) & against_mapie(quick)
    raise SystemExit(0 if met else 1)


if __name__ == "__main__":
    main()
