"""The attention family: functions of type ``types.Attend``, which compose by wrapping one another."""

from jaxmeth.attention import dhsa
from jaxmeth.attention.dense import dense

__all__ = ["dense", "dhsa"]
