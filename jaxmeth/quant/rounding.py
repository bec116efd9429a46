"""Rounding a weight: to the nearest, with the best scale, or column by column against the layer's inputs."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Float

from jaxmeth.quant.permute import check_numbers
from jaxmeth.quant.qtensor import QTensor, check_bits, dequantize, round_through
from jaxmeth.types import ConfigError, is_concrete

HIGHEST = jax.lax.Precision.HIGHEST
COLUMNS_AT_ONCE = 64
SHRINKS = 100
POWER_STEPS = 200


def _grid(w: Float[Array, "o i"], bits: int, group: int | None) -> Float[Array, "o g"]:
    """The absmax scale of each row, or of each run of ``group`` columns; 1 / q_max where all is zero."""
    if w.ndim != 2:
        raise ConfigError(f"w: found shape {w.shape}, expected [out, in]")
    top = 2 ** (bits - 1) - 1
    if group is not None and (group < 1 or w.shape[1] % group):
        raise ConfigError(f"group: found {group}, expected a whole number that divides the width {w.shape[1]}")
    groups = w.shape[1] // group if group else 1
    runs = w.reshape(w.shape[0], groups, w.shape[1] // groups)
    peak = jnp.abs(runs).max(-1, initial=0.0)
    return jnp.where(peak == 0, 1.0, peak) / top


def _runs(w: Float[Array, "o i"], scale: Float[Array, "o g"]) -> Float[Array, "o g r"]:
    """Columns that share a scale."""
    return w.reshape(*scale.shape, w.shape[1] // scale.shape[1])


def _nearest(w: Float[Array, "o i"], scale: Float[Array, "o g"], bits: int) -> Float[Array, "o i"]:
    """Codes as floats."""
    top = 2 ** (bits - 1) - 1
    runs = _runs(w, scale) / scale[..., None]
    return jnp.clip(round_through(runs), -top, top).reshape(w.shape)


def _exact(w: Float[Array, "o i"], bits: int) -> Float[Array, "o i"]:
    check_bits(bits)
    check_numbers(w, "w")
    return w.astype(jnp.promote_types(w.dtype, jnp.float32))


def quantize_weight(
    w: Float[Array, "o i"], bits: int = 4, scale: str | None = None, group: int | None = None
) -> QTensor:
    r"""Round a weight to the nearest point of a symmetric grid for each output channel.

    .. math:: s_o = \max_i |W_{oi}| / m, \quad q = \mathrm{clip}([W / s], -m, m), \quad m = 2^{B-1} - 1

    Args:
      w: ``[out, in]``.
      bits: B, 2 to 8.
      scale: None, or ``"mse"``: s times the k / 100, k = 1..100, that makes ``||W - dq||^2`` least.
      group: columns that share a scale; None = all of a row.

    Returns:
      ``QTensor``, q int8 ``[out, in]``, scale ``[out, 1]`` or ``[out, in / group]``, float32 or better. Rows of zeros
      stay zeros.

    Raises: ConfigError for bits outside 2 to 8, a group that does not divide in, NaN or infinity (outside jit).
    Reference: arXiv 2601.22347. Reconstruction: the public code searches the MSE scale by Fibonacci steps.
    """
    if scale not in (None, "mse"):
        raise ConfigError(f"scale: found {scale!r}, expected None or 'mse'")
    exact = _exact(w, bits)
    s = _grid(exact, bits, group)
    if scale == "mse":
        s = s * _best_shrink(exact, s, bits)
    return QTensor(_nearest(exact, s, bits).astype(jnp.int8), s, bits=bits)


def _best_shrink(w: Float[Array, "o i"], scale: Float[Array, "o g"], bits: int) -> Float[Array, "o g"]:
    def error(k):
        s = scale * (k / SHRINKS)
        gap = _runs(w, s) - _runs(_nearest(w, s, bits), s) * s[..., None]
        return jnp.square(gap).sum(-1)

    def better(k, best):
        least, at = best
        e = error(k)
        return jnp.minimum(e, least), jnp.where(e < least, k, at)

    # From the unshrunk scale down, so that ties keep it.
    start = (error(SHRINKS), jnp.full(scale.shape, SHRINKS))
    _, at = jax.lax.fori_loop(1, SHRINKS, lambda j, best: better(SHRINKS - j, best), start)
    return at / SHRINKS


def fake_quantize_weight(w: Float[Array, "o i"], bits: int, group: int | None = None) -> Float[Array, "o i"]:
    """``dequantize(quantize_weight(w))`` with straight-through gradients, the scale's included.

    Raises: ConfigError for bits outside 2 to 8.
    """
    check_bits(bits)
    s = _grid(w, bits, group)
    return (_runs(_nearest(w, s, bits), s) * s[..., None]).reshape(w.shape)


def _columns(
    v: Float[Array, "i o"], factor: Float[Array, "i i"], scale: Float[Array, "i o"], bits: int
) -> Float[Array, "i o"]:
    """Round column after column, each error spread over the columns behind it.

    ``q_t = Q(v_t); e = (v_t - q_t) / L_tt; v_{t:} -= e L[t, t:]``, L the upper factor of the inverse Hessian. The
    columns behind the current run of ``COLUMNS_AT_ONCE`` are updated once a run, by one product. Everything transposed.
    """
    n, run = v.shape[0], COLUMNS_AT_ONCE
    if n == 0:
        return v
    pad = -n % run
    v, scale = (jnp.pad(a, ((0, pad), (0, 0)), constant_values=1) for a in (v, scale))
    factor = jnp.pad(factor, ((0, pad), (0, pad))) + jnp.diag((jnp.arange(n + pad) >= n).astype(v.dtype))
    top = 2 ** (bits - 1) - 1

    def column(t, here):
        vs, errors, qs, upper, s = here
        q = jnp.clip(jnp.round(vs[t] / s[t]), -top, top)
        e = (vs[t] - q * s[t]) / upper[t, t]
        return vs - upper[t][:, None] * e[None], errors.at[t].set(e), qs.at[t].set(q), upper, s

    def several(v, start):
        vs, s, rows = (jax.lax.dynamic_slice_in_dim(a, start, run) for a in (v, scale, factor))
        upper = jax.lax.dynamic_slice_in_dim(rows, start, run, axis=1)
        here = (vs, jnp.zeros_like(vs), jnp.zeros_like(vs), upper, s)
        _, errors, qs, _, _ = jax.lax.fori_loop(0, run, column, here)
        return v - jnp.matmul(rows.T, errors, precision=HIGHEST), qs

    _, qs = jax.lax.scan(several, v, jnp.arange(0, n + pad, run))
    return qs.reshape(n + pad, -1)[:n]


def _upper_factor(inverse: Float[Array, "i i"]) -> Float[Array, "i i"]:
    """L with ``inverse = L^T L``, L upper triangular."""
    return jnp.linalg.cholesky((inverse + inverse.T) / 2).T


def _inverse(h: Float[Array, "i i"]) -> Float[Array, "i i"]:
    return cho_solve((jnp.linalg.cholesky(h), True), jnp.eye(h.shape[0], dtype=h.dtype))


class _Problem(NamedTuple):
    """A weight and its Hessian with dead columns settled and columns in the order of rounding."""

    w: Array
    h: Array
    scale: Array
    order: Array


def _problem(w, hessian, bits: int, group: int | None, act_order: bool) -> tuple[_Problem, Array]:
    """The problem, and the scale ``[out, g]`` of the weight as given."""
    exact = _exact(w, bits)
    h = hessian.astype(exact.dtype)
    check_numbers(h, "H")
    n = exact.shape[1]
    if h.shape != (n, n):
        raise ConfigError(f"H: found shape {h.shape}, expected {(n, n)}, the inputs of the weight")
    s = _grid(exact, bits, group)
    dead = jnp.diag(h) == 0
    exact = jnp.where(dead[None], 0, exact)
    h = h + jnp.diag(dead.astype(h.dtype))
    order = jnp.argsort(-jnp.diag(h), stable=True) if act_order else jnp.arange(n)
    each = jnp.repeat(s, n // s.shape[1], axis=1, total_repeat_length=n)
    return _Problem(exact[:, order], h[order][:, order], each[:, order], order), s


def _finish(codes: Float[Array, "i o"], problem: _Problem, scale: Float[Array, "o g"], bits: int) -> QTensor:
    back = jnp.argsort(problem.order)
    return QTensor(codes[back].T.astype(jnp.int8), scale, bits=bits)


@functools.partial(jax.jit, static_argnames=("bits", "group", "act_order"))
def _gptq(w, hessian, damp, *, bits, group, act_order):
    problem, s = _problem(w, hessian, bits, group, act_order)
    h = problem.h + damp * jnp.mean(jnp.diag(problem.h)) * jnp.eye(problem.h.shape[0], dtype=problem.h.dtype)
    factor = _upper_factor(_inverse(h))
    return _finish(_columns(problem.w.T, factor, problem.scale.T, bits), problem, s, bits), jnp.isfinite(factor).all()


def _solved(result: tuple[QTensor, Array], name: str, damping: float | Array) -> QTensor:
    """The rounded weight, where H could be factorised."""
    rounded, solved = result
    if is_concrete(solved) and not bool(solved):
        raise ConfigError(f"H: found no Cholesky factor with {name} {damping}, expected a positive definite matrix "
                          f"(a larger {name} makes it one)")  # fmt: skip
    return rounded


def gptq(
    w: Float[Array, "o i"],
    hessian: Float[Array, "j k"],
    *,
    bits: int = 4,
    damp: float = 0.01,
    act_order: bool = True,
    group: int | None = None,
) -> QTensor:
    r"""Round column by column; what is lost on one is made up for by those not yet rounded (GPTQ).

    .. math:: H^{-1} = L^\top L, \quad q_t = Q(v_t), \quad v_{t:} \leftarrow v_{t:} - (v_t - q_t) L_{t,t:} / L_{tt}

    Args:
      w: ``[out, in]``; the scales are fixed from it as given, as in ``quantize_weight``.
      hessian: H ``= X~^T X~ / N`` of the (quantised) layer inputs. A column of H with diagonal 0 (an input that is
        always 0) gets weight 0.
      bits: 2 to 8.
      damp: times the mean diagonal of H is added to the diagonal.
      act_order: round columns of large H_ii first; the result is in the order given.
      group: columns (in the order given) that share a scale; None = all of a row.

    Returns:
      ``QTensor`` as ``quantize_weight``.

    Raises: ConfigError as ``quantize_weight``; H of another size, NaN or infinite, or (outside jit) not positive
      definite with this damping.
    Reference: Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1.
    """
    for name, value in (("w", w), ("H", hessian)):
        check_numbers(value, name)
    return _solved(_gptq(w, hessian, damp, bits=bits, group=group, act_order=act_order), "damp", damp)


def _largest_eigenvalue(h: Float[Array, "i i"]) -> Float[Array, ""]:
    """Of a positive semi-definite matrix, by the power method; it needs few digits, as it only sets a damping."""
    start = h @ jnp.ones((h.shape[0],), h.dtype) + jnp.diag(h)

    def step(_, v):
        return h @ (v / jnp.maximum(jnp.linalg.norm(v), jnp.finfo(h.dtype).tiny))

    return jnp.linalg.norm(jax.lax.fori_loop(0, POWER_STEPS, step, start))


@functools.partial(jax.jit, static_argnames=("bits", "group", "act_order"))
def _qronos(w, hessian, cross, alpha, *, bits, group, act_order):
    lam = alpha * _largest_eigenvalue(hessian.astype(jnp.promote_types(w.dtype, jnp.float32)))
    problem, s = _problem(w, hessian, bits, group, act_order)
    v, h = problem.w, problem.h
    g = cross.astype(h.dtype)[problem.order][:, problem.order]
    # A dead input is the same in both: its weight is 0 and meets no other.
    eye = jnp.eye(h.shape[0], dtype=h.dtype)
    product = functools.partial(jnp.matmul, precision=HIGHEST)
    first = (product(v, g[:, 0]) - product(v[:, 1:], h[0, 1:])) / h[0, 0]
    top = 2 ** (bits - 1) - 1
    scale = problem.scale[:, 0]
    code = jnp.clip(jnp.round(first / scale), -top, top)
    inverse = _inverse(h + lam * eye)
    rest = inverse[1:, 1:] - inverse[1:, :1] * inverse[:1, 1:] / inverse[0, 0]
    target = product(v, (g + lam * eye)[:, 1:]) - (code * scale)[:, None] * h[:1, 1:]
    factor = _upper_factor(rest)
    behind = _columns(product(target, rest).T, factor, problem.scale[:, 1:].T, bits)
    return _finish(jnp.concatenate([code[None], behind]), problem, s, bits), jnp.isfinite(factor).all()


def qronos(
    w: Float[Array, "o i"],
    hessian: Float[Array, "j k"],
    cross: Float[Array, "l m"],
    *,
    bits: int = 4,
    alpha: float = 1e-3,
    act_order: bool = True,
    group: int | None = None,
) -> QTensor:
    r"""Round column by column against what the layer computed before anything was rounded (Qronos).

    With float inputs X and quantised inputs X~ of the same tokens, ``H = X~^T X~ / N`` and ``G = X^T X~ / N``; lam =
    alpha times the largest eigenvalue of H. The first column answers for the error of all inputs so far,

    .. math:: q_0 = Q\big((w G_{:0} - \sum_{j>0} w_j H_{0j}) / H_{00}\big),

    the others are then set to their best and rounded as in GPTQ:

    .. math:: v_{1:} = (w (G + \lambda I)_{:,1:} - q_0 H_{0,1:}) A, \quad A = (H + \lambda I)^{-1}
       \text{ without row and column } 0 \text{ (Schur)} = L^\top L

    Args:
      w: ``[out, in]``, in the basis (permuted, rotated) of the inputs.
      hessian: H.
      cross: G, float inputs first; its transpose is another matrix.
      alpha: see above.
      bits, act_order, group: as in ``gptq``.

    Returns:
      ``QTensor`` as ``quantize_weight``. Where X~ = X it equals ``gptq`` with the same absolute damping.

    Raises: ConfigError as ``gptq``; G of another size.
    Reference: Zhang et al., Qronos, arXiv 2505.11695, algorithm 1. Reconstruction: dead columns get weight 0 as in
      GPTQ, after lam; the public code leaves them at round to nearest.
    """
    for name, value in (("w", w), ("H", hessian), ("G", cross)):
        check_numbers(value, name)
    if cross.shape != hessian.shape:
        raise ConfigError(f"G: found shape {cross.shape}, expected that of H, {hessian.shape}")
    return _solved(_qronos(w, hessian, cross, alpha, bits=bits, group=group, act_order=act_order), "alpha", alpha)


# --- the same as strategies ------------------------------------------------------------------------------------------


class Rounding(NamedTuple):
    """The seam: ``fn(w, H, G, bits, group) -> QTensor``; without ``second_order`` H and G are None."""

    fn: Callable[..., QTensor]
    second_order: bool


def rtn(scale: str | None = None) -> Rounding:
    """Round to nearest; ``scale="mse"`` searches the scale."""
    return Rounding(lambda w, h, g, bits, group: quantize_weight(w, bits, scale, group), False)


def by_gptq(damp: float = 0.01, act_order: bool = True) -> Rounding:
    """``gptq``; the cross product is not used."""
    return Rounding(
        lambda w, h, g, bits, group: gptq(w, h, bits=bits, damp=damp, act_order=act_order, group=group), True
    )


def by_qronos(alpha: float = 1e-3, act_order: bool = True) -> Rounding:
    """``qronos``."""
    return Rounding(
        lambda w, h, g, bits, group: qronos(w, h, g, bits=bits, alpha=alpha, act_order=act_order, group=group), True
    )


def relative_error(w: Float[Array, "o i"], q: QTensor, x: Float[Array, "T i"], xq: Float[Array, "T i"]) -> Array:
    """``||x~ dq^T - x W^T||_F / ||x W^T||_F``: what the layer's output lost."""
    exact = jnp.matmul(x, w.T, precision=HIGHEST)
    return jnp.linalg.norm(jnp.matmul(xq, dequantize(q).T, precision=HIGHEST) - exact) / jnp.linalg.norm(exact)
