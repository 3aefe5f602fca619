"""Rules for products: matrix products, convolutions and attention. They apply only where a recipe may run these again.

[Note: the strides that a product read]
The strides of its operands choose the kernel that computes a product, and another kernel may add in another order. So
every operand of a product must have the strides that it had in forward, not only the same bits. A saved tensor has
them: a kept one as it is, a rebuilt one by its ``layout``, a view by its strides over a base that has them. Views and
casts of such tensors have them too, because their strides depend only on their input. Any other tensor (one that is not
saved because the other operand is frozen) gets the strides that the node saved; ``mm`` and ``addmm`` save them. If the
node saved none, there is no recipe. A product that was written into a tensor of the caller's (``addmm_``) has no recipe
either: see ``mutation.py``.

Attention with dropout runs again from the random state that was recorded as it ran, and has no recipe without it:
[Note: attention that draws] in ``rng.py``. On an accelerator two kinds of convolutions have no recipe. A transposed one
is computed as the gradient of a convolution, which may add with atomics. And while ``cudnn.benchmark`` is on, each
thread measures for itself which algorithm is fastest, and backward runs in another thread than forward. Outputs other
than the first, such as the logsumexp of attention, are small and kept.

A product runs again only under the settings of torch that it ran under in forward (``Walk.settings``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leangrad._torch import failed_allocations, output_facts
from leangrad.errors import LeangradError
from leangrad.ledger.origins.functions import NoRecipeError
from leangrad.ledger.origins.rules import pointwise, shapes  # noqa: F401  (``FOLLOWS`` looks up what they have entered)
from leangrad.ledger.origins.rules.rule import RULES, rule
from leangrad.ledger.values.node_metadata import DRAW, NOTE, Node
from leangrad.ledger.values.saved_view import view_of
from leangrad.ledger.values.value import Value

aten = torch.ops.aten
product = partial(rule, product=True)
# Called with an op that draws random numbers: runs it from the state of the generator from which it drew in forward.
RunAgain = Callable[[Callable[[], Any]], Any]

# ------------------------------------------------------------------------------------------------------------- matrices

product("MmBackward0", "self mat2", torch.mm)
product("BmmBackward0", "self mat2", torch.bmm)
product("MvBackward0", "self vec", torch.mv)
product("AddmmBackward0", "?self mat1 mat2", torch.addmm, beta="beta", alpha="alpha")
product("AddmvBackward0", "?self mat vec", torch.addmv, beta="beta", alpha="alpha")
product("BaddbmmBackward0", "?self batch1 batch2", torch.baddbmm, beta="beta", alpha="alpha")
product("AddbmmBackward0", "?self batch1 batch2", torch.addbmm, beta="beta", alpha="alpha")

# --------------------------------------------------------------------------------------------------------- convolutions

# All convolutions have one type of node: ATen chooses oneDNN, cuDNN or a kernel of its own below autograd.


def _biased_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    if not x.is_cuda:
        return aten.convolution.default(x, weight, bias, *settings)  # type: ignore[no-any-return]
    before = failed_allocations()
    y: Tensor = aten.convolution.default(x, weight, bias, *settings)
    if failed_allocations() != before:
        raise LeangradError(
            "a convolution that runs again in backward has found too little memory for its workspace, and would have "
            "other bits than in forward. To mend it, use a smaller batch, or no recipes through products."
        )
    return y


def _convolution(x: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    return _biased_convolution(x, weight, None, *settings)


def _is_repeatable(node: Node) -> bool:
    if output_facts(node).device.type == "cpu":
        return True
    return not node._saved_transposed and not torch.backends.cudnn.benchmark


def _has_bias(node: Node) -> bool:
    return _is_repeatable(node) and tuple(node._saved_bias_sym_sizes_opt or (0,)) != (0,)


def _has_no_bias(node: Node) -> bool:
    return _is_repeatable(node) and tuple(node._saved_bias_sym_sizes_opt or (0,)) == (0,)


_SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
product("ConvolutionBackward0", "input weight", _convolution, *_SETTINGS, when=_has_no_bias)
product("ConvolutionBackward0", "input weight ?bias", _biased_convolution, *_SETTINGS, when=_has_bias)

# ------------------------------------------------------------------------------------------------------------ attention


def _flash_for_cpu(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, attn_mask: Tensor | None
) -> Tensor:
    attend = aten._scaled_dot_product_flash_attention_for_cpu.default
    return attend(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]  # type: ignore[no-any-return]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, p: float = 0.0, draw: RunAgain | None = None
) -> Tensor:
    attend = aten._scaled_dot_product_flash_attention.default
    return _attend(partial(attend, q, k, v, p, is_causal, scale=scale), draw)


def _with_bias(attend: Any) -> Callable[..., Tensor]:
    """Returns the function of a rule for the kernel ``attend``, which takes a bias or a mask."""

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_bias: Tensor | None,
        is_causal: bool,
        scale: float | None,
        p: float = 0.0,
        draw: RunAgain | None = None,
    ) -> Tensor:
        return _attend(partial(attend, q, k, v, attn_bias, True, p, is_causal, scale=scale), draw)

    return run


def _attend(run: Callable[[], Sequence[Tensor]], draw: RunAgain | None) -> Tensor:
    return (run() if draw is None else draw(run))[0]


def _drops_nothing(node: Node) -> bool:
    return node._saved_dropout_p == 0  # type: ignore[no-any-return]


def _draws(node: Node) -> bool:
    return not _drops_nothing(node) and DRAW in node.metadata.get(NOTE, ())


def _learns_bias(node: Node) -> bool:
    return len(node.next_functions) > 3 and node.next_functions[3][0] is not None


_QKV = "query key value"
_HOW = ("is_causal", "scale")
_ATTENTION = "ScaledDotProduct{}AttentionBackward0".format
_KERNELS = {
    "Efficient": _with_bias(aten._scaled_dot_product_efficient_attention.default),
    "Cudnn": _with_bias(aten._scaled_dot_product_cudnn_attention.default),
}


def _attention(when: Callable[[Node], bool], *dropout: str) -> None:
    """Add the rules of attention on an accelerator.

    when: the nodes that they apply to: those with dropout, or those without.
    dropout: names of further constants, for attention with dropout.
    """

    def learned(node: Node) -> bool:
        return when(node) and _learns_bias(node)

    def other(node: Node) -> bool:
        return when(node) and not _learns_bias(node)

    product(_ATTENTION("Flash"), _QKV, _flash, *_HOW, *dropout, when=when)
    for kind, function in _KERNELS.items():
        product(_ATTENTION(kind), f"{_QKV} attn_bias", function, *_HOW, *dropout, when=learned)
        product(_ATTENTION(kind), _QKV, function, "attn_bias", *_HOW, *dropout, when=other)


product("ScaledDotProductFlashAttentionForCpuBackward0", _QKV, _flash_for_cpu, *_HOW, "attn_mask", when=_drops_nothing)
_attention(_drops_nothing)
_attention(_draws, "dropout_p", f"?{DRAW}")

# ----------------------------------------------------------------- strides: see [Note: the strides that a product read]

_VIEWS = "View UnsafeView ReshapeAlias Alias Expand T Transpose Permute Unsqueeze Squeeze Select Slice Diagonal Unfold"
_PARTS = "Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Unbind"
# Type names of nodes whose outputs have strides that depend only on those of their input, and the functions that replay
# them.
FOLLOWING = frozenset(f"{name}Backward{n}" for name in f"{_VIEWS} {_PARTS} ToCopy".split() for n in range(3))
FOLLOWS = {r.function for node in FOLLOWING for r in RULES.get(node, ())} | {view_of}


def has_exact_strides(value: Value) -> bool:
    """Whether ``value`` has the strides that it had in forward when a recipe reads it."""
    while value.tensor is None and value.layout is None and not value.is_product:
        if value.function not in FOLLOWS:
            return False
        value = value.inputs[0]
    tensor = value.tensor
    return tensor is None or (tensor.layout is torch.strided and not tensor.is_nested)


def with_exact_strides(node: Node, name: str, operand: Any) -> Value:
    """Returns the operand ``name`` of the product of ``node``, with the strides that the product read in forward.

    Raises NoRecipeError if these are not known.
    """
    name = name.lstrip("?")
    if type(operand) is not Value:
        raise NoRecipeError(f"{type(node).__name__} does not save its {name}")
    if has_exact_strides(operand):
        return operand
    sizes, strides = (getattr(node, f"_saved_{name}_sym_{what}", ()) for what in ("sizes", "strides"))
    if not strides or not _is_dense(sizes, strides):
        raise NoRecipeError(f"{type(node).__name__} read its {name} with strides that nobody knows")
    value = Value("layout")
    value.set_recipe(_lay_out, (operand, tuple(sizes), tuple(strides)), {})
    value.nbytes = operand.nbytes
    return value


def _lay_out(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    if tensor.stride() == tuple(strides):
        return tensor
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their memory: no two share a place, and no place is unused."""
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True
