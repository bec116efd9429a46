"""Permute, rotate, then quantise."""

from jaxmeth.quant.hadamard import block_hadamard, hadamard, has_hadamard, outlier_bound
from jaxmeth.quant.permute import (
    MassState,
    Permute,
    absmax_order,
    block_masses,
    by_absmax,
    by_chance,
    by_identity,
    by_mass,
    by_zigzag,
    channel_mass,
    mass_init,
    massdiff,
    random_perm,
    update_mass,
    zigzag,
)

__all__ = [
    "MassState",
    "Permute",
    "absmax_order",
    "block_hadamard",
    "block_masses",
    "by_absmax",
    "by_chance",
    "by_identity",
    "by_mass",
    "by_zigzag",
    "channel_mass",
    "hadamard",
    "has_hadamard",
    "mass_init",
    "massdiff",
    "outlier_bound",
    "random_perm",
    "update_mass",
    "zigzag",
]
