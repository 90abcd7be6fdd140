"""Frozen weights in few bits: exact where each example is quantized by itself, refused where a scale serves them all.

| weights                                           | input                                | per-example gradients   |
|---------------------------------------------------|--------------------------------------|-------------------------|
| 4 bits (bitsandbytes), int8 or int4 (torchao)     | as it is: weights are unpacked       | exact, of these weights |
| int8 or fp8 (torchao), one scale per row of input | quantized, each position by itself   | exact, where it has any |
| int8 or fp8 (torchao), one scale for the input    | quantized by the largest of them all | refused: examples mix   |
| 8 bits (bitsandbytes)                             | outlier columns of the whole batch   | refused: examples mix   |
"""

from __future__ import annotations

from torch import nn

# Scales that belong to one position of one example.
_BY_ROW = {"PerRow", "PerToken"}


def shared_scale(module: nn.Module) -> str | None:
    """Say how a module scales its whole input at once, so that one example moves the rounding of others."""
    for parameter in module._parameters.values():
        settings = getattr(parameter, "act_quant_kwargs", None)
        granularity = type(getattr(settings, "granularity", None)).__name__
        if settings is not None and granularity not in _BY_ROW:
            return (
                f"quantizes its input with one scale for the whole batch ({granularity}); quantize weights only, or "
                "with one scale per row (granularity=PerRow())"
            )
        if hasattr(parameter, "input_quant_func"):
            return "quantizes its input by a function that may look at the whole batch; quantize weights only"
    return None
