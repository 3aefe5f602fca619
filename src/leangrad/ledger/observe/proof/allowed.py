"""What the code of a forward may call: functions, methods and modules whose every change of a tensor is recorded.

Each of them changes tensors only through ops that autograd records, or not at all. So there is no ``detach`` here, no
``data``, nothing that takes a function, no ``out=``, and no view that is not differentiable (``search.py`` refuses
``view`` with a dtype). Running statistics are the exception: see [Note: running statistics].
"""

from __future__ import annotations

import math
import operator
import os
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ATTRIBUTES", "BATCH_NORM", "BATCH_NORMS", "BIAS", "CONSTANTS", "CONTAINERS", "COPIES", "COPY"]
__all__ += ["DEFAULT_EPS", "EPS", "EPS_OF_LAYERS", "FRESH", "FRESH_METHODS", "FRESH_MODULES", "FUNCTIONS", "INERT"]
__all__ += ["MEMORY_FORMAT", "METHODS", "MODULES", "NEVER", "NORMS", "OF_DTYPES", "OTHER_COPIES", "VIEWS", "found_in"]

# Functions of tensors that are functions of torch and methods of tensors alike.
_BOTH = """
    abs add addcdiv addcmul addmm all allclose amax amin any arccos arcsin arctan argmax argmin argsort atan atan2
    baddbmm bmm bucketize cat ceil chunk clamp clamp_max clamp_min clip clone concat cos cosh count_nonzero cross cummax
    cumprod cumsum diag diagonal diff div divide dot einsum eq equal erf erfc exp expand_copy expm1 flatten flip floor
    floor_divide fmod frac gather ge gelu greater gt index_add index_copy index_fill index_select isclose isfinite isinf
    isnan kron le lerp less log log10 log1p log2 log_softmax logaddexp logical_and logical_not logical_or logical_xor
    logsumexp lt masked_fill masked_select matmul max maximum mean median min minimum mm moveaxis movedim mul multiply
    mv nan_to_num narrow ne neg negative nonzero norm numel outer permute pow prod ravel reciprocal relu remainder
    repeat_interleave reshape roll rot90 round rsqrt rsub scatter scatter_add searchsorted select sigmoid sign sin sinh
    softmax sort split sqrt square squeeze stack std std_mean sub subtract sum swapaxes swapdims t take_along_dim tan
    tanh tensor_split tile topk transpose tril triu true_divide unbind unflatten unique unsqueeze var var_mean where
    xlogy zeros_like ones_like full_like empty_like rand_like randn_like hstack vstack dstack
"""
_MAKERS = """
    arange as_tensor empty eye finfo full iinfo linspace meshgrid ones rand randint randn randperm tensor zeros
    broadcast_tensors broadcast_to conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d tril_indices
    triu_indices is_floating_point is_tensor is_grad_enabled is_autocast_enabled get_default_dtype device bernoulli
    is_autocast_cpu_enabled multinomial normal layer_norm group_norm rms_norm batch_norm instance_norm selu celu
    rrelu prelu dropout threshold pixel_shuffle pixel_unshuffle cosine_similarity cdist promote_types result_type
"""
_OF_F = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d batch_norm binary_cross_entropy
    binary_cross_entropy_with_logits celu conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    cosine_similarity cross_entropy dropout dropout1d dropout2d dropout3d alpha_dropout elu elu_ embedding fold gelu glu
    grid_sample group_norm hardsigmoid hardswish hardtanh huber_loss instance_norm interpolate kl_div l1_loss layer_norm
    leaky_relu leaky_relu_ linear local_response_norm log_softmax logsigmoid lp_pool2d max_pool1d max_pool2d max_pool3d
    mish mse_loss nll_loss normalize one_hot pad pixel_shuffle pixel_unshuffle prelu relu relu6 relu_ rms_norm
    scaled_dot_product_attention selu sigmoid silu smooth_l1_loss softmax softmin softplus softshrink softsign tanh
    tanhshrink threshold unfold upsample affine_grid channel_shuffle
"""
# Not those whose results would have other strides out of place: see ``mutation.CONTIGUOUS``.
_IN_PLACE = """
    abs_ add_ bernoulli_ ceil_ clamp_ clamp_max_ clamp_min_ cos_ div_ exp_ fill_ floor_ log_ mul_ neg_ normal_ pow_
    reciprocal_ relu_ round_ rsqrt_ sigmoid_ silu_ sin_ sqrt_ square_ sub_ tanh_ uniform_ zero_
"""
_OF_TENSORS = """
    bfloat16 bool contiguous cpu cuda dim double element_size expand expand_as float get_device half int is_contiguous
    is_complex is_floating_point item long new_empty new_full new_ones new_tensor new_zeros repeat reshape_as size
    stride tolist to type_as unfold view view_as bernoulli
"""
# Methods of lists, tuples, dictionaries, strings and numbers.
_OF_PYTHON = """
    append copy count endswith extend format get index insert is_integer items join keys lower pop reverse setdefault
    split startswith strip update upper values
"""

METHODS = frozenset((_BOTH + _IN_PLACE + _OF_TENSORS + _OF_PYTHON).split())
ATTRIBUTES = frozenset(("shape", "ndim", "requires_grad", "is_cuda", "is_cpu", "itemsize", "nbytes"))
VIEWS = frozenset(("T", "mT"))
INERT = frozenset(("dtype", "device", "layout", "type", "index", "eps", "max", "min"))  # of tensors, dtypes and finfo

# Functions that are always false in a forward that the ledger observes.
NEVER = [torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch.onnx.is_in_onnx_export]


def found_in(holder: Any, names: str) -> list[Any]:
    """Return what ``holder`` has under these names, unless other code than torch's or Python's is there."""
    found = [getattr(holder, name) for name in names.split() if hasattr(holder, name)]
    return [one for one in found if not isinstance(one, FunctionType) or _is_known(one.__code__.co_filename)]


def _is_known(file: str) -> bool:
    torchs, pythons = os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.__file__) + os.sep
    installed = {"site-packages", "dist-packages"} & set(file.split(os.sep))
    return file.startswith(torchs) or (file.startswith(pythons) and not installed)


_TORCHS = found_in(torch, _BOTH + _MAKERS + "relu_ exp_ sigmoid_ tanh_")
_SPECIALS = [*found_in(torch, "_assert"), torch.linalg.norm, torch.linalg.vector_norm, torch.Size]
_TENSORS = found_in(Tensor, _BOTH + _IN_PLACE + "contiguous expand to float size repeat")
_PYTHONS = [len, range, int, float, bool, str, abs, min, max, sum, round, tuple, list, dict, sorted, reversed]
_PYTHONS += [any, all, print]
_MATHS = found_in(math, "sqrt ceil floor log log2 exp pow prod cos sin gcd isqrt isnan isinf")
_OPERATORS = found_in(operator, "add mul sub truediv floordiv neg matmul mod pow")
_ALL = [*_TORCHS, *found_in(F, _OF_F), *_SPECIALS, *_TENSORS, *_PYTHONS, *_MATHS, *_OPERATORS]
FUNCTIONS: dict[int, Any] = {id(one): one for one in _ALL if callable(one)}

# Functions and layers whose result is new memory.
_NEW = """
    abs add addcdiv addcmul addmm amax amin arange baddbmm bmm cat clone concat cos cumsum div exp full_like log
    log_softmax logsumexp matmul max maximum mean min minimum mm mul ones_like outer pow rsqrt rsub sigmoid sin softmax
    sqrt square stack std sub sum tanh tril triu var where zeros zeros_like ones empty full linspace
"""
_NEW_OF_F = """
    adaptive_avg_pool2d avg_pool2d max_pool2d batch_norm conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d cross_entropy embedding gelu group_norm instance_norm interpolate layer_norm linear log_softmax
    mse_loss normalize one_hot rms_norm scaled_dot_product_attention sigmoid softmax softplus tanh
"""
FRESH = frozenset(found_in(torch, _NEW) + found_in(F, _NEW_OF_F))
# Functions that return dtypes or devices, whatever they are given.
OF_DTYPES = frozenset(found_in(torch, "get_default_dtype result_type promote_types device finfo iinfo"))
FRESH_METHODS = frozenset((_NEW + "new_zeros new_ones new_empty new_full size dim numel stride").split())

# Norms whose nodes do not store their eps: by function, the type of the nodes that it makes, and the place of eps among
# its arguments; the defaults of those that are not written in Python; by layer, the nodes, and the function it calls.
EPS = {F.layer_norm: ("NativeLayerNormBackward0", 4), F.rms_norm: ("FusedRmsNormBackward0", 3)}
EPS |= {torch.layer_norm: EPS[F.layer_norm], torch.rms_norm: EPS[F.rms_norm]}
DEFAULT_EPS: dict[Any, float | None] = {torch.layer_norm: 1e-5, torch.rms_norm: None}
EPS_OF_LAYERS: dict[Any, tuple[str, Any]] = {
    nn.LayerNorm: (EPS[F.layer_norm][0], F.layer_norm),
    nn.RMSNorm: (EPS[F.rms_norm][0], F.rms_norm),
}
# The node of a batch norm, which does not tell whether a bias that has no edge is None, or frozen.
BATCH_NORM, BIAS = "NativeBatchNormBackward0", "bias"
# The node of a copy, the constant that it does not store, the functions and methods that make copies with its default,
# and functions that make them in a format that is not known here.
COPY, MEMORY_FORMAT = "CloneBackward0", "memory_format"
COPIES: dict[Any, torch.memory_format] = {torch.clone: torch.preserve_format, Tensor.clone: torch.preserve_format}
COPIES |= {Tensor.contiguous: torch.contiguous_format}
OTHER_COPIES = (F.group_norm, torch.group_norm)
# Attributes of modules whose values count, and not only their class.
CONSTANTS = frozenset(("eps", "variance_epsilon"))

NEVER += found_in(torch.jit, "is_scripting is_tracing")
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LAYERS = """
    Identity Linear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Unfold Fold Flatten
    Unflatten LayerNorm GroupNorm RMSNorm LocalResponseNorm MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d LPPool2d
    Dropout Dropout1d Dropout2d Dropout3d AlphaDropout ReLU ReLU6 LeakyReLU PReLU RReLU ELU CELU SELU GELU GLU SiLU Mish
    Sigmoid LogSigmoid Tanh Tanhshrink Softplus Softshrink Softsign Hardsigmoid Hardswish Hardtanh Hardshrink Threshold
    Softmax Softmax2d Softmin LogSoftmax ReflectionPad1d ReflectionPad2d ReplicationPad1d ReplicationPad2d ZeroPad1d
    ZeroPad2d ConstantPad1d ConstantPad2d Upsample UpsamplingBilinear2d UpsamplingNearest2d PixelShuffle PixelUnshuffle
    ChannelShuffle Embedding CosineSimilarity CrossEntropyLoss NLLLoss MSELoss L1Loss SmoothL1Loss HuberLoss BCELoss
    BCEWithLogitsLoss KLDivLoss
"""
# The layers, by class, and the forward of each.
MODULES = {kind: kind.forward for kind in (*found_in(nn, _LAYERS), *NORMS) if found_in(kind, "forward")}
_NEW_LAYERS = """
    Linear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d LayerNorm GroupNorm RMSNorm MaxPool2d
    AvgPool2d Embedding GELU Sigmoid Tanh Softmax CrossEntropyLoss MSELoss
"""
FRESH_MODULES = frozenset((*found_in(nn, _NEW_LAYERS), *NORMS))
