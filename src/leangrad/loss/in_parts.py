"""The cross entropy of a lean model, bit for bit torch's own: only the logits are kept, nothing else of their size.

The ledger's function mode sees every call of `F.cross_entropy`. It runs `InParts` instead if the logits are large and
were cast from logits of half precision, as `logits.float()` are. Plain PyTorch keeps the log-probabilities for
backward, and allocates two tensors of their size there. `InParts` keeps the logits of half precision, and the ledger
rebuilds the cast ones from them. In backward the gradient is written over the rebuilt logits, which no other tensor
shares. For 8192 tokens and 128,256 words in bfloat16 the memory is 8.4 GB at the end of forward, a copy of the model's
own logits included, and 6.3 GB at the beginning of backward; in plain PyTorch it is 10.5 GB and 12.6 GB.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function_unary

from leangrad import _torch
from leangrad.engine.ownership import fills_storage, held_alone
from leangrad.functional import autocast_enabled, runs_plain
from leangrad.ledger.learn.items import value_of
from leangrad.ledger.observe.call_args import argument
from leangrad.ledger.observe.function_mode import FunctionMode
from leangrad.ledger.observe.handlers import HANDLERS
from leangrad.ledger.values.cast import NODE as NODE_OF_CAST
from leangrad.ledger.values.node_metadata import OPAQUE
from leangrad.ledger.values.pending_save import packed_in
from leangrad.ops import cross_entropy as ops

__all__ = ["InParts"]

REDUCTIONS = {"mean": ops.MEAN, "sum": ops.SUM}
NAMES = {number: name for name, number in REDUCTIONS.items()}
LARGEST = 1 << 63  # ignore_index must fit into int64, as classes must
PLAIN = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}  # values that are required


class InParts(torch.autograd.Function):
    """The cross entropy of logits, computed for some rows at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, terms: ops.Terms) -> Tensor:
        """Return the loss, and save logits, targets and the number of rows that count."""
        loss, total = ops.forward(x, target, terms)
        ctx.terms = terms
        ctx.save_for_backward(x, target, total)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the logits, written over them if they were rebuilt for this node alone."""
        terms: ops.Terms = ctx.terms
        saved = [*ctx.saved_tensors]
        if torch.is_grad_enabled() or _torch.is_batched(grad):  # create_graph=True, or many gradients at once
            x, target, _ = saved
            is_differentiable = torch.is_grad_enabled()
            with torch.enable_grad():
                # An alias: hooks of x itself run where the engine hands on what is returned here, and only there.
                given = x.view_as(x) if is_differentiable else x.detach().requires_grad_()
                found = F.log_softmax(given.to(terms.softmax), -1).to(terms.loss)
                loss = F.nll_loss(found, target, reduction=NAMES[terms.reduction], ignore_index=terms.ignore_index)
            return *torch.autograd.grad(loss, given, grad, create_graph=is_differentiable), None, None
        is_ours = held_alone(saved)[0] and fills_storage(saved[0])
        x, target, total = saved
        into = x if is_ours else torch.empty_like(x)
        return ops.backward(grad, x, target, total, terms, into.detach()), None, None


def _handle(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a call of `F.cross_entropy` in a region: run `InParts`, or else the call itself."""
    x, target = argument(func, args, kwargs, "input"), argument(func, args, kwargs, "target")
    reduction = _number(argument(func, args, kwargs, "reduction"))
    ignore_index = argument(func, args, kwargs, "ignore_index")
    is_usual = type(ignore_index) is int and -LARGEST <= ignore_index < LARGEST
    is_usual = is_usual and all(argument(func, args, kwargs, name) == usual for name, usual in PLAIN.items())
    if reduction is None or not is_usual or not _takes(x, target) or not _is_rebuilt(mode, x):
        return func(*args, **kwargs)
    if not mode.region.splits_losses:  # others read these logits too: see `Ledger._plan`
        return func(*args, **kwargs)
    if not _sees_itself(mode) or not _are_classes(x, target, ignore_index):
        return func(*args, **kwargs)
    dtypes = _dtypes(x.device.type, x.dtype, autocast_enabled(x.device.type))
    if dtypes is None:
        return func(*args, **kwargs)
    mode.region.saves_cast_logits = True
    try:
        loss = InParts.apply(x, target, ops.Terms(*dtypes, reduction, ignore_index))
    finally:
        mode.region.saves_cast_logits = False
    value = value_of(packed_in(loss.grad_fn._raw_saved_tensors[0]))
    if value is not None and value.tensor is not None:  # could not be rebuilt: kept, which plain PyTorch does not do
        value.plain_keeps_it = False
        mode.region.watch(value)
    return loss


def _number(reduction: Any) -> int | None:
    return REDUCTIONS.get(reduction) if type(reduction) is str else None


@cache
def _dtypes(device: str, dtype: torch.dtype, is_autocast: bool) -> tuple[torch.dtype, torch.dtype] | None:
    """Return the dtypes in which torch computes the log-probabilities and the loss; None if its graph is unknown.

    The dtypes are read off the graph of a small call. The call runs in a new thread, where no hooks or modes are set.
    """
    found: list[tuple[torch.dtype, list[str]]] = []
    thread = threading.Thread(target=lambda: found.append(_graph_of_a_call(device, dtype, is_autocast)))
    thread.start()
    thread.join()
    if not found:  # the call raised an error
        return None
    loss, names = found[0]
    softmax = "LogSoftmaxBackward0"
    if names == [softmax]:
        return (dtype, dtype) if loss == dtype else None
    if names == [softmax, NODE_OF_CAST]:
        return loss, loss
    return (dtype, loss) if names == [NODE_OF_CAST, softmax] else None


def _graph_of_a_call(device: str, dtype: torch.dtype, is_autocast: bool) -> tuple[torch.dtype, list[str]]:
    """Run a small cross entropy; return the loss's dtype and the names of the nodes between loss and logits."""
    with torch.autocast(device, enabled=is_autocast):
        sample = torch.zeros(2, 2, dtype=dtype, device=device, requires_grad=True)
        loss = F.cross_entropy(sample, torch.zeros(2, dtype=torch.int64, device=device))
    names, node = [], loss.grad_fn
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return loss.dtype, names[1:-1]


def _takes(x: Any, target: Any) -> bool:
    """Whether `InParts` can run: ``x`` are rows of logits, ``target`` their classes, and parts save memory."""
    return (
        isinstance(x, Tensor)
        and isinstance(target, Tensor)
        and x.requires_grad
        and torch.is_grad_enabled()
        and not runs_plain(x, target)
        and x.device.type in ops.DEVICES
        and x.device == target.device
        and x.is_floating_point()
        and x.is_contiguous()
        and target.dtype is torch.int64
        and target.dim() == 1
        and x.dim() == 2
        and x.shape[0] == target.shape[0]
        and ops.is_large(x)
    )


def _is_rebuilt(mode: FunctionMode, x: Tensor) -> bool:
    """Whether ``x`` is all of a tensor that was cast from logits with fewer bits, which can be kept instead of ``x``.

    Plain PyTorch keeps no logits, so a model or its user may write into them after the loss. Such a write does no harm
    if ``x`` is rebuilt, but would if ``x`` itself were kept. (Of the logits with fewer bits docs/limits.md tells.)
    Of a part of the cast tensor all would be rebuilt, and the gradient could not be written over it.
    """
    base: Any = x if x._base is None else x._base
    node = base.grad_fn
    if (
        node is None
        or base.numel() != x.numel()
        or node.name() != NODE_OF_CAST
        or node._sequence_nr() < mode.region.trusted_from
        or node.metadata.get(OPAQUE)
    ):
        return False
    before, nr = node.next_functions[0]
    if before is None or before._sequence_nr() < mode.region.trusted_from:
        return False
    return bool(_torch.output_facts(before, nr).dtype.itemsize < x.itemsize)


def _sees_itself(mode: FunctionMode) -> bool:
    """Whether only this region sees the call: no other function mode, no checkpoint, no saved-tensor hooks of others.

    A checkpoint counts the tensors that its segment saves, and both runs must save the same number. False also if the
    region's own hooks are not set because, by the trace, nothing of the call is rebuilt: then `InParts` would keep the
    logits, which plain PyTorch does not keep.
    """
    is_ours = getattr(_torch.innermost_pack_hook(), "__self__", None) is mode.region
    return is_ours and not mode.region.runs_again and not has_torch_function_unary(None)


def _are_classes(x: Tensor, target: Tensor, ignore_index: int) -> bool:
    """Whether every target is a class or ``ignore_index``; if not, torch's own call raises the error.

    Always True on a GPU, where checking would synchronize.
    """
    if not x.is_cpu:
        return True
    wrong = (target != ignore_index) & ((target < 0) | (target >= x.shape[1]))
    return not bool(wrong.any())


HANDLERS[F.cross_entropy] = _handle
