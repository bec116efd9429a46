"""Models: Flax modules used purely. ``apply(params, cfg, tokens) -> Output`` and ``generate(...) -> Generation``."""

from jaxmeth.models.decoder import DecoderConfig, abstract_params, apply, init, init_cache
from jaxmeth.models.generate import generate
from jaxmeth.models.layers import RopeConfig, linear

__all__ = ["DecoderConfig", "RopeConfig", "abstract_params", "apply", "generate", "init", "init_cache", "linear"]
