"""Hugging Face in and out: ``load``, ``save``, and ``default``, a real model out of an installed package."""

from jaxmeth.hf.chat import render
from jaxmeth.hf.config import config_from_hf, config_to_hf
from jaxmeth.hf.load import Checkpoint, cache_folder, default, load
from jaxmeth.hf.save import save

__all__ = ["Checkpoint", "cache_folder", "config_from_hf", "config_to_hf", "default", "load", "render", "save"]
