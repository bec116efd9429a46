"""What is static about a decoder."""

import dataclasses

from jaxmeth.models.layers import ACTIVATIONS, RopeConfig
from jaxmeth.types import ConfigError


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Everything static about a decoder; hashable, so it can be a static argument of ``jax.jit``.

    Attributes:
      model_type: the Hugging Face name of the family (``llama``, ``gemma3_text``, ...).
      vocab_size: V.
      hidden_size: C.
      num_layers: L.
      num_heads: H, query heads.
      num_kv_heads: Hkv, divides H.
      head_dim: D.
      intermediate_size: width of the MLP.
      max_positions: longest sequence the model accepts.
      norm: ``rmsnorm`` or ``layernorm``.
      norm_eps: added to the variance.
      norm_offset: added to the scale (Gemma: 1).
      norm_order: ``pre``, ``post`` or ``sandwich``.
      parallel_residual: attention and MLP read the same input.
      qk_norm: ``none``, ``head`` (over D) or ``full`` (over all heads together).
      activation: a key of ``layers.ACTIVATIONS``.
      gated_mlp: ``down(act(gate x) * up x)`` rather than ``down(act(up x))``.
      attention_bias: biases on q, k, v.
      attention_out_bias: bias on o.
      mlp_bias: biases in the MLP.
      head_bias: bias on the logits.
      learned_positions: a table of position embeddings (GPT-2).
      ropes: the distinct rotary embeddings.
      layer_ropes: index into ``ropes``, one a layer; empty = all 0.
      rotary_dim: rotated channels of D; None = all.
      layer_windows: sliding window a layer, 0 = full; empty = all 0.
      attention_scale: factor on q.k; None = ``head_dim ** -0.5``.
      attention_softcap: c of ``c tanh(score / c)``.
      logit_softcap: the same on the logits.
      embed_scale: factor on the embeddings (Gemma: sqrt(C)).
      tie_embeddings: the embedding is also the head.
      causal: False makes every token see every other (masked diffusion).
      bos_token_id: beginning of sequence, if the model has one.
      eos_token_ids: tokens that end a generation.
      pad_token_id: padding, if the model has one.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm: str = "rmsnorm"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_order: str = "pre"
    parallel_residual: bool = False
    qk_norm: str = "none"
    activation: str = "silu"
    gated_mlp: bool = True
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    learned_positions: bool = False
    ropes: tuple[RopeConfig, ...] = (RopeConfig(),)
    layer_ropes: tuple[int, ...] = ()
    rotary_dim: int | None = None
    layer_windows: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    tie_embeddings: bool = False
    causal: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        for name, allowed in (
            ("norm", ("rmsnorm", "layernorm")),
            ("norm_order", ("pre", "post", "sandwich")),
            ("qk_norm", ("none", "head", "full")),
            ("activation", tuple(ACTIVATIONS)),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}: found {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "intermediate_size", "max_positions"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: found {getattr(self, name)}, expected at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads: found {self.num_kv_heads}, which does not divide num_heads {self.num_heads}"
            )
        for name in ("layer_ropes", "layer_windows"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise ConfigError(
                    f"{name}: found {len(getattr(self, name))} entries, expected num_layers {self.num_layers}"
                )
