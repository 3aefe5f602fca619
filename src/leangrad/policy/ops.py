"""Classifies ops by name: which never run twice, which amplify a difference in an input's last bit, and their work.

Names are those of ATen without namespace and overload: ``addmm``, ``_scaled_dot_product_flash_attention``. A list of
full names would miss the next kernel of the same kind, as other projects' lists miss cuDNN's attention. So the patterns
match words inside a name.

The work of an op is in bytes moved: arithmetic counts as the bytes that take as long to move.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

__all__ = ["is_discrete", "is_heavy", "is_product", "is_source", "work_of"]

Shape = tuple[int, ...]

BALANCE = 200  # operations that take as long as moving one byte, on a current accelerator in half precision
VECTOR = 3  # the same for depthwise convolutions, which do not run on matrix units
_PRODUCT = re.compile(
    r"(^|_)(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|matmul|linear|bilinear|trilinear|einsum|tensordot|spmm)(_|$)"
    r"|conv(?!ert)|attention|sdp|lstm|gru|rnn"
)
# Not products, but expensive: each element of the result depends on many elements, in an order of the op's own.
_DEAR = re.compile(
    r"(^|_)(sort|argsort|msort|topk|kthvalue|median|nanmedian|mode|quantile|nanquantile|unique|unique2|histc|histogram"
    r"|histogramdd|bincount|cumsum|cumprod|cummax|cummin|logcumsumexp|scan|searchsorted|bucketize|nonzero|masked_select"
    r"|fft|stft|istft|linalg|cholesky|svd|eig|eigh|qr|lu|solve|inverse|det|slogdet|matrix_exp|ctc|grid_sampler|upsample"
    r"|affine_grid|scatter|index_put|index_add|index_copy|index_reduce|put|renorm|item|local_scalar_dense|unfold"
    r"|col2im|im2col|fold|cdist|pdist|kron)(_|\d|$)"
    r"|embedding_bag|(cudnn|miopen|mkldnn)(?!_batch_norm)"
)
_SOURCE = re.compile(
    r"(^|_)(rand|randn|randint|randperm|bernoulli|multinomial|normal|uniform|exponential|poisson|binomial|cauchy"
    r"|geometric|log_normal|random_|dropout|rrelu|seed|seeds|philox_rand)(_|$)|(^|_)(rand|randn|randint|normal)_like"
)
# Their results are decisions: a difference in the last bit of an input may change them completely.
_DISCRETE = re.compile(
    r"(^|_)(eq|ne|lt|le|gt|ge|equal|isclose|argmax|argmin|round|floor|ceil|trunc|fix|sign|sgn|signbit|heaviside"
    r"|floor_divide|remainder|fmod|isnan|isinf|isfinite|one_hot|bitwise_\w+|logical_\w+|low_memory_max_pool\w*"
    r"|max_pool\w*|adaptive_max_pool\w*|fractional_max_pool\w*)(_|\d|$)"
)


def is_heavy(name: str) -> bool:
    """Whether an op of this name never runs twice.

    >>> [is_heavy(name) for name in ("addmm", "_scaled_dot_product_cudnn_attention", "convert_element_type", "gelu")]
    [True, True, False, False]
    """
    return is_product(name) or _DEAR.search(name) is not None


def is_product(name: str) -> bool:
    """Whether an op of this name multiplies matrices: a product, a convolution, an attention, a recurrent layer.

    >>> [is_product(name) for name in ("addmm", "convolution", "sort", "gelu")]
    [True, True, False, False]
    """
    return _PRODUCT.search(name) is not None


def is_source(name: str) -> bool:
    """Whether an op of this name draws random numbers.

    >>> [is_source(name) for name in ("native_dropout", "inductor_seeds", "normal_functional", "layer_norm")]
    [True, True, True, False]
    """
    return _SOURCE.search(name) is not None


def is_discrete(name: str) -> bool:
    """Whether the result of an op of this name is a decision: a comparison, a rounding, an index.

    >>> [is_discrete(name) for name in ("gt", "argmax", "round", "mul")]
    [True, True, True, False]
    """
    return _DISCRETE.search(name) is not None


def work_of(name: str, shapes: Sequence[Shape], elements: int, moved: int) -> int:
    """Return the work of an op that has a kernel of its own.

    name: name of the op, without namespace and overload.
    shapes: shapes of its inputs.
    elements: number of elements of its output.
    moved: the bytes that it reads and writes.

    >>> work_of("mm", [(512, 512), (512, 512)], 512 * 512, moved=3 * 512 * 512 * 2)  # too small to be bound by products
    1572864
    >>> work_of("mm", [(4096, 4096), (4096, 4096)], 4096 * 4096, moved=3 * 4096 * 4096 * 2)
    687194767
    >>> work_of("linear_cross_entropy", [(8192, 4096), (128256, 4096), (8192,)], 1, moved=0)
    129106716917
    """
    return max(moved, _operations(name, shapes, elements) // (VECTOR if _is_depthwise(name, shapes) else BALANCE))


def _operations(name: str, shapes: Sequence[Shape], elements: int) -> int:
    """Return roughly how many operations a product takes: 2 per element of its result and of the inner dimension."""
    given = [shape for shape in shapes if len(shape) >= 2]
    if not given or not is_heavy(name):
        return 0
    if "linear_cross_entropy" in name and len(given) > 1:
        return 6 * prod(given[0]) * given[1][0]  # the gradients are computed with the loss
    is_backward = "backward" in name
    if "conv" in name and len(given) > 1:
        outer = prod(given[0]) if is_backward else elements
        return 2 * prod(given[-1][1:]) * outer * (2 if is_backward else 1)
    if "attention" in name and len(given) > 2:
        return 4 * prod(given[0]) * given[1][-2] * (2 if is_backward else 1)
    return 2 * elements * given[-2 if len(given) > 1 else 0][-1]


def _is_depthwise(name: str, shapes: Sequence[Shape]) -> bool:
    """Whether the op is a convolution in which each output channel reads only one input channel."""
    weights = [shape for shape in shapes if len(shape) >= 3]
    return "conv" in name and bool(weights) and weights[-1][1] == 1 and weights[-1][0] > 1
