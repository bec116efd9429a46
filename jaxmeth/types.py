"""The map of the library: the shared PyTrees, the seams of the families, and the errors.

A family is defined by one function type. A method is a plain function of that type, and methods compose by that
type's own algebra (wrapping an ``Attend``, folding ``Reparam``s, ...). Shapes use the letters of the whole library:
B batch, T query tokens, S key slots, L layers, H query heads, Hkv key/value heads, D head dim, C hidden, V vocabulary.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxmeth.errors import CheckpointError as CheckpointError
from jaxmeth.errors import ConfigError as ConfigError
from jaxmeth.errors import JaxmethError as JaxmethError
from jaxmeth.errors import WeightsError as WeightsError

Params = dict[str, Any]
"""A nested dict of arrays, or of weight leaves that ``models.layers.linear`` understands (see ``LinearWeight``)."""

State = Any
"""A PyTree of a method's own; at the attention seam its leaves carry a leading layer axis outside the layer scan."""


@runtime_checkable
class LinearWeight(Protocol):
    """A weight that is not a plain array: quantised, low-rank adapted, rotated online. A PyTree with one method."""

    def matmul(self, x: Array) -> Array:
        """``x [..., in] -> [..., out]``, what ``x @ weight.T`` is for a plain array."""
        ...


@struct.dataclass
class AttendContext:
    """What an ``Attend`` may need besides q, k, v. Slots index the key axis; positions count real tokens.

    ``window`` is a traced scalar, at least S where the layer has no window.
    """

    q_pos: Int[Array, "B T"]
    kv_pos: Int[Array, "B S"]
    q_slot: Int[Array, " T"]
    kv_valid: Bool[Array, "B S"]
    layer: Int[Array, ""]
    window: Int[Array, ""]
    scale: float = struct.field(pytree_node=False)
    softcap: float | None = struct.field(pytree_node=False, default=None)
    causal: bool = struct.field(pytree_node=False, default=True)

    def mask(self) -> Bool[Array, "B 1 T S"]:
        """True = take part: causality (by slot), window, padding and cache validity joined."""
        slots = jnp.arange(self.kv_valid.shape[1], dtype=self.q_slot.dtype)
        distance = self.q_slot[:, None] - slots[None, :]
        near = (distance >= 0) & (distance < self.window) if self.causal else jnp.abs(distance) < self.window
        return near[None, None] & self.kv_valid[:, None, None, :]


Attend = Callable[[Array, Array, Array, AttendContext, State], tuple[Array, State]]
"""``(q [B,H,T,D], k [B,Hkv,S,D], v [B,Hkv,S,D], ctx, state) -> (out [B,H,T,D], state)``, after RoPE and QK norm."""


class Cache(NamedTuple):
    """Keys and values of the tokens seen so far; one write index for the whole batch (left padding aligns rows)."""

    k: Float[Array, "L B Hkv S D"]
    v: Float[Array, "L B Hkv S D"]
    pos: Int[Array, "B S"]
    valid: Bool[Array, "B S"]
    index: Int[Array, ""]


class Output(NamedTuple):
    """What ``models.apply`` returns; ``hidden`` is after the last norm."""

    logits: Float[Array, "B T V"]
    hidden: Float[Array, "B T C"]
    cache: Cache | None
    state: State


class StepInfo(NamedTuple):
    """What ``generate`` shows an observer after each token; ``active`` rows were still running when it was made."""

    token: Int[Array, " B"]
    logprob: Float32[Array, " B"]
    entropy: Float32[Array, " B"]
    state: State
    active: Bool[Array, " B"]


Observe = Callable[[Any, StepInfo], tuple[Any, Bool[Array, " B"]]]
"""``(carry, StepInfo) -> (carry, stop bool[B])``, run inside the compiled generation loop."""


class Generation(NamedTuple):
    """New tokens only, 0 past ``lengths``; a stop token counts. Logprobs and entropy in nats, before temperature."""

    tokens: Int[Array, "B N"]
    logprobs: Float32[Array, "B N"]
    entropy: Float32[Array, "B N"]
    lengths: Int[Array, " B"]
    state: State
    carry: Any


Score = Callable[..., Float[Array, " B"]]
"""The uncertainty seam: outputs of a generation -> one number an answer, higher = less trustworthy."""

Law = Callable[[Array, Array, Array], Array]
"""The scaling seam: ``(theta, N, D) -> loss``."""


def is_concrete(x: Any) -> bool:
    """Whether the values of ``x`` can be read now (not a tracer), so that a host-side check is possible."""
    return not isinstance(x, jax.core.Tracer)


def extremes(x: Any) -> tuple[Any, Any]:
    """Least and greatest of readable numbers; by NumPy, as inside ``jit`` JAX would trace even what is known."""
    host = np.asarray(x)
    return host.min().item(), host.max().item()


def whole_number(name: str, value: Any, low: int) -> int:
    """``value`` as an int. Raises: ConfigError naming it where it is no whole number of at least ``low``, or a bool."""
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = low - 1
    if number < low:
        raise ConfigError(f"{name}: found {value!r}, expected a whole number of at least {low}")
    return number
