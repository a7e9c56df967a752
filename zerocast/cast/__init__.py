"""The sentence: partial amax, one all-reduce, scale, partial cast; then all-gather and
post-all-gather processing.
"""

from zerocast.cast.functional import (
    cast_master_weights_to_fp8,
    cast_master_weights_to_nvfp4,
    post_all_gather_processing,
    quantize_master_weights,
)
from zerocast.cast.plan import CastPlan

__all__ = [
    "CastPlan",
    "cast_master_weights_to_fp8",
    "cast_master_weights_to_nvfp4",
    "post_all_gather_processing",
    "quantize_master_weights",
]
