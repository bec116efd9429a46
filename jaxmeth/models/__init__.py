"""Models: Flax modules used purely. ``apply(params, cfg, tokens) -> Output`` and ``generate(...) -> Generation``."""

from jaxtyping import Array

from jaxmeth.models import decoder, encoder
from jaxmeth.models.config import DecoderConfig
from jaxmeth.models.decoder import apply, init_cache
from jaxmeth.models.encoder import (
    BertConfig,
    BertOutput,
    DualEncoderConfig,
    TextTowerConfig,
    VisionTowerConfig,
    encode_image,
    encode_text,
    similarity,
)
from jaxmeth.models.generate import generate
from jaxmeth.models.layers import RopeConfig, linear
from jaxmeth.types import Params

__all__ = [
    "BertConfig",
    "BertOutput",
    "DecoderConfig",
    "DualEncoderConfig",
    "RopeConfig",
    "TextTowerConfig",
    "VisionTowerConfig",
    "abstract_params",
    "apply",
    "encode_image",
    "encode_text",
    "generate",
    "init",
    "init_cache",
    "linear",
    "similarity",
]

Config = DecoderConfig | BertConfig | DualEncoderConfig


def init(cfg: Config, key: Array) -> Params:
    """Random parameters of a decoder or an encoder; consumes ``key``. See ``decoder.init`` and ``encoder.init``."""
    return decoder.init(cfg, key) if isinstance(cfg, DecoderConfig) else encoder.init(cfg, key)


def abstract_params(cfg: Config) -> Params:
    """The parameter tree of a configuration as ``jax.ShapeDtypeStruct``s; computes nothing."""
    return decoder.abstract_params(cfg) if isinstance(cfg, DecoderConfig) else encoder.abstract_params(cfg)
