"""`linear_cross_entropy`: the projection to the vocabulary and its cross entropy as one op that keeps no logits.

[Note: gradients in forward] With `reduction` "mean" or "sum" the gradients of all tokens have one common factor, which
is known only in backward. Everything else of the gradients is computed in forward, while the logits of a chunk are in
memory, so no product runs twice. The gradients are held until backward in float32; there they are multiplied by the
factor and rounded once, as plain PyTorch rounds once. With "none" each token has a factor of its own: backward computes
the logits again, chunk by chunk, four products instead of three. Backward does the same if forward ran inside other
saved-tensor hooks, such as those of `torch.utils.checkpoint` and `save_on_cpu`: these hooks must receive the tensors
that are kept.

[Note: second backward] The last backward, the one that does not retain the graph, overwrites and returns the held
gradients. Backward passes before it only read them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.errors import LeangradError
from leangrad.functional import LOW_OR_SINGLE, autocast_enabled, runs_plain
from leangrad.ledger.observe.active_region import ledger_saves
from leangrad.loss.reference import Options, Tensors, plain_linear_cross_entropy
from leangrad.ops import linear_cross_entropy as ops
from leangrad.overridable import overridable
from leangrad.packed.slots import SLOTS, deliver

__all__ = ["fused_linear_cross_entropy", "linear_cross_entropy", "loss_and_gradients"]


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor | None = None,
) -> Tensor:
    """Project to a vocabulary and take the cross entropy, without ever having all logits in memory.

    Equals, with its own rounding and for a target of any shape,

        z = F.linear(input, linear_weight, linear_bias)
        z = logit_scale * z                             # where given, first: Cohere's
        z = softcap * torch.tanh(z / softcap)           # where given, second: Gemma 2's
        loss = F.cross_entropy(z.float(), target, weight, reduction=..., ignore_index=..., label_smoothing=...)
        loss += z_loss * torch.logsumexp(z, -1) ** 2    # of valid tokens, and reduced as the loss is

    where the z-loss does not use class weights: its mean is over the tokens that are not ignored. The loss is float32,
    or float64 for a float64 input.

    input: (..., D), linear_weight: (V, D), target: (...), class indices; linear_bias and weight, of the classes: (V,);
    logit_scale: a number, or a tensor of one element, which gets its gradient too. A target that is neither a class nor
    `ignore_index` raises IndexError on a CPU and fails an assertion on a GPU, as in `F.cross_entropy`.

    Keeps for backward, with "mean" and "sum", the gradients of the input and of the weight in float32, as far as they
    are needed: 4·N·D and 4·V·D bytes for N tokens. With "none" it keeps its arguments. While it runs it also has the
    logits of one chunk: at most 64 MiB on a CPU, 512 MiB on a GPU, 256 MiB there in bfloat16; on a GPU, if the weight
    needs a gradient, up to half the bytes of that gradient. Plain PyTorch keeps 4·N·V bytes and more.

    >>> hidden, table = torch.randn(8, 16, requires_grad=True), torch.randn(1000, 16, requires_grad=True)
    >>> loss = linear_cross_entropy(hidden, table, torch.arange(8))
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ table.T, torch.arange(8)))
    True
    """
    options = Options(reduction, ignore_index, label_smoothing, z_loss, softcap)
    _check_options(options)
    _check(input, linear_weight, target, linear_bias, weight)
    scale = _scale(logit_scale, input)
    target = target.long()  # `F.cross_entropy` takes uint8 too
    tensors = Tensors(input, linear_weight, linear_bias, scale, weight, target)
    if runs_plain(*tensors) or any(t is not None and not _is_dense(t) for t in tensors):
        return plain_linear_cross_entropy(tensors, options)
    _check_target(target, len(linear_weight), ignore_index)
    return fused_linear_cross_entropy(tensors, options, _product_dtype(tensors))


def fused_linear_cross_entropy(tensors: Tensors, options: Options, dtype: torch.dtype) -> Tensor:
    """Return the loss of checked arguments, with the projection in `dtype`, whatever autocast's state is."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        in_forward = options.reduction != "none" and (ledger_saves() or not _torch.saved_tensor_hooks_active())
        return _apply(*tensors, options, dtype, in_forward)  # type: ignore[no-any-return]
    with torch.no_grad(), _autocast_off(tensors.input):
        problem = _problem(tensors, options, dtype)
        return _Reduction(problem, options).loss(*ops.losses(problem), tensors.target.shape)


def loss_and_gradients(
    tensors: Tensors, options: Options, dtype: torch.dtype, needs: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, ops.Gradients]:
    """Return the loss, a factor, and the gradients of input, weight and bias that `needs` asks for, else None.

    The returned gradients have yet to be multiplied by the factor and by the gradient of the loss; see [Note: gradients
    in forward]. The reduction must be "mean" or "sum". Autograd records nothing. A target that is no class is an error.
    """
    with torch.no_grad(), _autocast_off(tensors.input):
        _check_target(tensors.target, len(tensors.linear_weight), options.ignore_index)
        problem = _problem(tensors, options, dtype)
        reduction = _Reduction(problem, options)
        if any(needs):
            nll, lse, found = ops.gradients(problem, None, reduction.z_factor(), needs=(*needs, False))
        else:
            (nll, lse), found = ops.losses(problem), ops.Gradients(None, None, None, None, None)
        factor, _ = _Held(found, reduction, problem.scale).factors(torch.ones_like(reduction.tokens))
        assert factor is not None
        return reduction.loss(nll, lse, tensors.target.shape), factor, found


# Arguments


def _check_options(options: Options) -> None:
    if options.reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction: expected 'none', 'mean' or 'sum', got {options.reduction!r}")
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: expected a number from 0 to 1, got {options.label_smoothing}")
    if options.softcap is not None and not options.softcap > 0.0:
        raise ValueError(f"softcap: expected a number above 0, or None for no cap, got {options.softcap}")


def _check(input: Tensor, linear_weight: Tensor, target: Tensor, bias: Tensor | None, weight: Tensor | None) -> None:
    named = {"input": input, "linear_weight": linear_weight, "linear_bias": bias, "weight": weight}
    for name, tensor in named.items():
        if tensor is None and name in ("linear_bias", "weight"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: expected a floating dtype, got {tensor.dtype}")
        if tensor.device != input.device:
            raise ValueError(f"{name} is on {tensor.device}, input on {input.device}; move one of them")
    if not isinstance(target, Tensor):
        raise TypeError(f"target: expected a tensor, got {type(target).__name__}")
    if target.is_floating_point():
        raise TypeError(
            f"target: expected class indices, int64, got {target.dtype}; class probabilities are as large as the "
            "logits: use F.cross_entropy(F.linear(input, linear_weight), target) for them"
        )
    if target.dtype not in (torch.int64, torch.uint8):
        raise TypeError(f"target: expected class indices, int64, got {target.dtype}; convert it with target.long()")
    if target.device != input.device:
        raise ValueError(f"target is on {target.device}, input on {input.device}; move one of them")
    if linear_weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            "input and linear_weight: expected (..., D) and (V, D), got "
            f"{tuple(input.shape)} and {tuple(linear_weight.shape)}"
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target: expected {tuple(input.shape[:-1])}, an index for each row of the input, got {tuple(target.shape)}"
        )
    for name, tensor in (("linear_bias", bias), ("weight", weight)):
        if tensor is not None and tensor.shape != linear_weight.shape[:1]:
            raise ValueError(
                f"{name}: expected ({len(linear_weight)},), a number for each class, got {tuple(tensor.shape)}"
            )
    if weight is not None and weight.requires_grad:
        raise ValueError("weight: class weights get no gradient; pass weight.detach()")


def _scale(logit_scale: float | Tensor | None, input: Tensor) -> Tensor | None:
    """Return the scale as a tensor on the input's device; None if there is no scale."""
    if logit_scale is None:
        return None
    if not isinstance(logit_scale, Tensor):
        return torch.full((), float(logit_scale), dtype=ops.logits_dtype(input), device=input.device)
    if logit_scale.numel() != 1 or not logit_scale.is_floating_point():
        raise ValueError(
            "logit_scale: expected a number, or a floating tensor of one element, "
            f"got {logit_scale.dtype} of {tuple(logit_scale.shape)}"
        )
    return logit_scale.to(input.device)


def _check_target(target: Tensor, classes: int, ignore_index: int) -> None:
    outside = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if target.device.type != "cpu":
        message = f"linear_cross_entropy: a target is no class of {classes} and not ignore_index"
        _torch.assert_on_device(~outside.any(), message)
    elif outside.any():
        raise IndexError(
            f"Target {target[outside][0].item()} is out of bounds: expected 0 to {classes - 1}, or {ignore_index} "
            "to ignore a token"
        )


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type != "meta"


def _product_dtype(tensors: Tensors) -> torch.dtype:
    """Return the dtype that the projection is computed in: autocast's, or else that of the arguments."""
    given = [t.dtype for t in tensors[:3] if t is not None]
    if autocast_enabled(tensors.input.device.type) and LOW_OR_SINGLE.issuperset(given):
        return torch.get_autocast_dtype(tensors.input.device.type)
    if len(set(given)) > 1:
        raise TypeError(
            f"input, linear_weight and linear_bias: expected one dtype, got {', '.join(map(str, given))}; "
            "convert them, or call this under torch.autocast"
        )
    if given[0] not in LOW_OR_SINGLE and given[0] != torch.float64:
        raise TypeError(f"input: expected float16, bfloat16, float32 or float64, got {given[0]}")
    return given[0]


def _autocast_off(tensor: Tensor) -> Any:
    """Return a context without autocast.

    Autocast's cache would keep the casts that a Function makes, which have no autograd history.
    """
    return _torch.autocast_off(tensor.device.type)


# The op


def _problem(tensors: Tensors, options: Options, dtype: torch.dtype) -> ops.Problem:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bias, scale, classes = tensors.linear_bias, tensors.logit_scale, tensors.weight
    return ops.Problem(
        x=tensors.input.reshape(-1, tensors.input.shape[-1]).to(dtype),
        weight=tensors.linear_weight.to(dtype),
        bias=None if bias is None else bias.to(dtype).contiguous(),
        target=tensors.target.reshape(-1).contiguous(),
        class_weight=None if classes is None else classes.to(wide).contiguous(),
        scale=None if scale is None else scale.reshape(()).to(wide),
        softcap=options.softcap,
        label_smoothing=options.label_smoothing,
        ignore_index=options.ignore_index,
    )


class _Reduction:
    """The reduction of the tokens' losses: their sum divided by `weights`, that of the z-loss divided by `tokens`.

    With "mean", `weights` is the sum of the class weights of all valid targets, and `tokens` is their number; with
    "sum" and "none" both are 1.
    """

    def __init__(self, problem: ops.Problem, options: Options) -> None:
        self.reduction, self.z_loss = options.reduction, options.z_loss
        self.wide = wide = ops.logits_dtype(problem.x)
        self.weights = self.tokens = torch.ones((), dtype=wide, device=problem.x.device)
        if options.reduction == "mean":
            valid = problem.target != options.ignore_index
            self.weights = self.tokens = valid.sum().to(wide)
            if problem.class_weight is not None:
                self.weights = (problem.class_weight[problem.target.masked_fill(~valid, 0)] * valid).sum()

    def loss(self, nll: Tensor, logsumexp: Tensor, shape: torch.Size) -> Tensor:
        if self.reduction == "none":
            losses = nll.new_empty(shape)  # not a view, which could not be changed in place (`losses *= mask`)
            return losses.copy_((nll if self.z_loss == 0 else nll + self.z_loss * logsumexp.square_()).view(shape))
        # In float64: thousands of tokens in float32 would round the loss more than plain PyTorch's sum does.
        loss = nll.sum(dtype=torch.float64) / self.weights
        if self.z_loss != 0:
            loss = loss + self.z_loss * (logsumexp.double().square_().sum() / self.tokens)
        return loss.to(self.wide)

    def z_factor(self) -> Tensor | None:
        """Return the factor of a token's z-loss relative to its nll; None if there is no z-loss."""
        if self.z_loss == 0:
            return None
        return self.z_loss * self.weights / self.tokens.clamp_min(1)

    def factor(self, g: Tensor) -> Tensor:
        """Return the factor of all gradients, given the gradient `g` of the loss.

        If no target is valid the gradients are 0, although the loss is NaN.
        """
        return g.to(self.wide) / torch.where(self.tokens == 0, 1, self.weights)


class _Held:
    """Gradients that have yet to be multiplied by a factor, rounded and returned."""

    def __init__(self, found: ops.Gradients, reduction: _Reduction, scale: Tensor | None) -> None:
        self._gradients = list(found[:4])
        self._unit, self._reduction, self._scale = found.unit, reduction, scale

    def factors(self, g: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the factor of dx, dW and db, and that of ds; None stands for 1.

        g: the gradient of the loss; None: the held gradients include it already.
        """
        by_one = None if g is None else self._reduction.factor(g)
        if self._unit is not None:
            by_one = self._unit.reciprocal() if by_one is None else by_one / self._unit
        by_scale = by_one
        if self._scale is not None:
            by_scale = self._scale if by_one is None else by_one * self._scale
        return by_scale, by_one

    def get(self, place: int, take: bool) -> Tensor | None:
        """Return the gradient at index `place` of `Tensors`; with `take` the reference to it is dropped here."""
        gradient = self._gradients[place]
        if take:
            self._gradients[place] = None
        return gradient


class _LinearCrossEntropy(torch.autograd.Function):
    """The autograd Function; see [Note: gradients in forward]. Its tensor arguments are in the order of `Tensors`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        weight: Tensor | None,
        target: Tensor,
        options: Options,
        dtype: torch.dtype,
        in_forward: bool,
    ) -> Tensor:
        tensors = Tensors(input, linear_weight, bias, scale, weight, target)
        ctx.options, ctx.dtype, ctx.in_forward, ctx.held = options, dtype, in_forward, None
        # Packed parameters, to find their slots; their values are not read.
        ctx.parameters = [None if SLOTS.get(parameter) is None else parameter for parameter in (linear_weight, bias)]
        ctx.like = [None if t is None else (t.shape, t.dtype) for t in tensors[:4]]
        with _autocast_off(input):
            problem = _problem(tensors, options, dtype)
            reduction = _Reduction(problem, options)
            if not in_forward:
                ctx.save_for_backward(*tensors)
                return reduction.loss(*ops.losses(problem), target.shape)
            nll, lse, found = ops.gradients(problem, None, reduction.z_factor(), needs=ctx.needs_input_grad[:4])
            ctx.held = _Held(found, reduction, problem.scale)
            ctx.save_for_backward(reduction.tokens)  # so that torch itself refuses a backward through a freed graph
            return reduction.loss(nll, lse, target.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if torch.is_grad_enabled() and ctx.in_forward:
            raise LeangradError(
                "the gradients of linear_cross_entropy were computed in its forward and cannot be differentiated again "
                "(create_graph=True); call it with reduction='none' and reduce the result yourself, or, "
                "where logits are lazy, use leangrad.lean(model, exact=True)"
            )
        if torch.is_grad_enabled() or (not ctx.in_forward and not _torch.has_memory(g)):
            return (*_plain_backward(ctx, Tensors(*saved), g), None, None, None, None, None)
        with _autocast_off(g):
            if ctx.in_forward:
                found = _finish(ctx, ctx.held, g, takes=_torch.has_memory(g) and not _torch.graph_is_kept())
            else:
                found = _finish(ctx, _recompute(ctx, Tensors(*saved), g), None, takes=True)
        return (*found, None, None, None, None, None)


_apply = overridable(_LinearCrossEntropy.apply, product=True)


def _recompute(ctx: Any, tensors: Tensors, g: Tensor) -> _Held:
    """Compute the gradients in backward, from the saved arguments: three products, after one in forward."""
    problem = _problem(tensors, ctx.options, ctx.dtype)
    reduction = _Reduction(problem, ctx.options)
    factors = g.reshape(-1) if ctx.options.reduction == "none" else reduction.factor(g).expand(len(problem.x))
    _, _, found = ops.gradients(problem, factors, reduction.z_factor(), needs=ctx.needs_input_grad[:4])
    return _Held(found, reduction, problem.scale)


def _finish(ctx: Any, held: _Held, g: Tensor | None, takes: bool) -> list[Tensor | None]:
    """Multiply the held gradients by their factors, round once, and return them.

    The gradient of a packed parameter is written into its slot. takes: the held gradients may be overwritten.
    """
    by_scale, by_one = held.factors(g)
    found: list[Tensor | None] = [None] * 4
    for place, factor in enumerate((by_scale, by_scale, by_scale, by_one)):
        gradient = held.get(place, takes)
        if gradient is None:
            continue
        shape, dtype = ctx.like[place]
        parameter = ctx.parameters[place - 1] if place in (1, 2) else None
        if parameter is None or (g is not None and not _torch.has_memory(g)):
            found[place] = _scaled(gradient, factor, takes, shape, dtype)
            continue
        wide = _scaled(gradient, factor, takes, shape, gradient.dtype)  # once, even if `deliver` calls `compute` often

        def compute(out: Tensor | None, add: bool, wide: Tensor = wide, dtype: torch.dtype = dtype) -> Tensor:
            if out is None:
                return wide.to(dtype)
            return out.add_(wide) if add else out.copy_(wide)

        found[place] = deliver(ctx, place, parameter, compute, "the loss writes it")
    return found


def _scaled(gradient: Tensor, factor: Tensor | None, is_ours: bool, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return `gradient` times `factor` in this shape and dtype; `is_ours`: it may be computed in place."""
    if factor is None:
        scaled = gradient if is_ours else gradient.clone()
    elif gradient.is_cuda and gradient.dtype != dtype and _torch.has_memory(factor):
        # One pass over memory. A CPU would allocate a temporary as large as the gradient for this.
        scaled = torch.mul(gradient, factor, out=torch.empty(gradient.shape, dtype=dtype, device=gradient.device))
    else:
        scaled = gradient.mul_(factor) if is_ours else gradient * factor
    return scaled.to(dtype).reshape(shape)


def _plain_backward(ctx: Any, tensors: Tensors, g: Tensor) -> list[Tensor | None]:
    """Return the gradients by torch's own ops, which can be differentiated again."""
    with torch.enable_grad(), _autocast_off(g):
        # One alias per argument: a tensor that is passed twice must get two gradients, and hooks of the argument itself
        # run where the engine hands on what is returned here, and only there.
        aliases = Tensors(*(None if t is None else t.view_as(t) for t in tensors))  # type: ignore[arg-type]
        wanted = [t for t, needed in zip(aliases, ctx.needs_input_grad, strict=False) if needed and t is not None]
        bias = aliases.linear_bias
        cast = aliases._replace(
            input=aliases.input.to(ctx.dtype),
            linear_weight=aliases.linear_weight.to(ctx.dtype),
            linear_bias=None if bias is None else bias.to(ctx.dtype),
        )
        loss = plain_linear_cross_entropy(cast, ctx.options)
    found = iter(torch.autograd.grad(loss, wanted, g, create_graph=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:4]]
