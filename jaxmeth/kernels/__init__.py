"""Kernels: one folder an operation, one public function an operation, which chooses its backend by platform."""

from jaxmeth.kernels.block_attention import block_attention, block_mask, check_lists, dense_lists
from jaxmeth.kernels.decode_attention import decode_attention
from jaxmeth.kernels.hadamard_quantize import hadamard_quantize
from jaxmeth.kernels.quantized_matmul import quantized_matmul

__all__ = ["block_attention", "block_mask", "check_lists", "decode_attention", "dense_lists", "hadamard_quantize",
           "quantized_matmul"]  # fmt: skip
