"""The attention context, on matrices: x, y (T, D), C (D, D), and a learned scalar s.

    update     n = min(T, 32) rows of x and y, max(1, T // n) apart; non-finite values become 0; channels are centred
               corr_ij = Σ x_i·y_j / (‖x_i‖·‖y_j‖), 0 where the denominator is 1e-12 or less
               C ← (1 − r)·C + r·tanh(corr)
    apply      X' = X + (s/D)·XC
    backward   P  = dX'·Cᵀ
               dX = dX' + (s/D)·P
               ds = (1/D)·Σ dX'⊙(XC) = (1/D)·Σ X⊙P, summed in float64

ds is computed from P and not from XC, because dX needs P as well: backward has one product, not two, also if s is 0.
Scratch comes from a workspace: from the second step on, only X' is allocated, and no other tensor as large as X.

Every update changes C in place. A caller that applies C and will run backward must keep a copy of it.
"""

import torch
from torch import Tensor

from leangrad import workspace
from leangrad._torch import is_traced
from leangrad.kernels import kernels_of, serves

__all__ = ["apply_context", "apply_context_backward", "update_context"]

ROWS = 32
SMALLEST = 1e-12  # denominator of a correlation

# Elements that are summed at once. Two float64 chunks stay in a CPU's cache; on a GPU few launches matter more.
CHUNK = {"cpu": 1 << 17, "cuda": 1 << 21}


def apply_context(
    x: Tensor, context: Tensor, strength: Tensor, *, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """X' = X + (s/D)·XC, in the dtype of x. Equals `x + strength / D * (x @ context)`.

    x: (T, D); context: (D, D); strength: one element. `dtype`: that of the product; that of x if None. `out` must not
    overlap x.

    >>> apply_context(torch.ones(2, 4), torch.ones(4, 4), torch.tensor(0.5)).unique()
    tensor([1.5000])
    """
    dtype = dtype or x.dtype
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    borrow = workspace.default.borrow
    with borrow("context.scaled", context.shape, dtype=dtype, like=context) as scaled:
        torch.mul(_at_least(context, dtype), _scale(strength, context.shape[0], dtype), out=scaled.tensor)
        if dtype == x.dtype:
            return torch.addmm(x, x, scaled.tensor, out=out)
        with (
            borrow("context.x", x.shape, dtype=dtype, like=x) as low,
            borrow("context.product", x.shape, dtype=dtype, like=x) as product,
        ):
            low.tensor.copy_(x)
            torch.mm(low.tensor, scaled.tensor, out=product.tensor)
            return torch.add(x, product.tensor, out=out)


def apply_context_backward(
    g: Tensor,
    x: Tensor | None,
    context: Tensor,
    strength: Tensor,
    *,
    needs_input: bool = True,
    into: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of x, if `needs_input`, and of the strength (float64, 0-d), if x is given; else None.

    g: (T, D), the gradient of X'; context: the one that was applied, in the dtype of its product. dX is written into
    `into`, which may be g itself.

    >>> g = x = torch.ones(2, 4)
    >>> apply_context_backward(g, x, torch.ones(4, 4), torch.tensor(0.5), into=g)
    (tensor([[1.5000, 1.5000, 1.5000, 1.5000],
            [1.5000, 1.5000, 1.5000, 1.5000]]), tensor(8., dtype=torch.float64))
    """
    borrow = workspace.default.borrow
    with borrow("context.product", g.shape, like=context) as product:
        if g.dtype == context.dtype:
            torch.mm(g, context.t(), out=product.tensor)
        else:
            with borrow("context.x", g.shape, like=context) as low:
                low.tensor.copy_(g)
                torch.mm(low.tensor, context.t(), out=product.tensor)
        dx = None
        if needs_input:
            dx = torch.empty(g.shape, dtype=g.dtype, device=g.device) if into is None else into
        if g.numel() and all(t is None or (serves(t) and t.is_contiguous()) for t in (g, product.tensor, x, dx)):
            ds = kernels_of("context").finish_backward(g, product.tensor, x, strength, dx)
        else:
            ds = None if x is None else _dot(x, product.tensor)  # before g is written over: x may be g
            if dx is not None:
                torch.addcmul(g, product.tensor, _scale(strength, context.shape[0], g.dtype), out=dx)
        return dx, None if ds is None else ds.div_(context.shape[0])


def update_context(x: Tensor, y: Tensor, rate: float, context: Tensor | None = None) -> Tensor:
    """Move `context` by `rate` towards the correlations of x and y, in place, and return it.

    x, y: (..., D), a block's input and its mixer's output. A context of (D, D) is overwritten; for any other, or None,
    a new one that begins at 0 is returned, in float32, or float64 for float64 inputs. If x has no rows, the context
    does not change. A finite context stays finite, whatever x and y are. `rate` is clamped to [0, 1].

    >>> x = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    >>> context = update_context(x, -x, rate=1.0)
    >>> context
    tensor([[-0.7616,  0.0000],
            [ 0.0000,  0.0000]])
    >>> update_context(x, x, 0.5, context).data_ptr() == context.data_ptr()
    True
    """
    width, rate = x.shape[-1], min(max(rate, 0.0), 1.0)
    dtype = torch.promote_types(x.dtype, torch.float32)
    if context is None or context.shape != (width, width):
        context = torch.zeros(width, width, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return context
    if is_traced():  # a compiler plans its memory itself
        return _move(context, _correlate(x, y, dtype), rate)
    with (
        workspace.default.borrow("context.correlation", context.shape, dtype=dtype, device=x.device) as found,
        workspace.default.borrow("context.denominator", context.shape, dtype=dtype, device=x.device) as denominator,
    ):
        return _move(context, _correlate(x, y, dtype, found.tensor, denominator.tensor), rate)


def _move(context: Tensor, correlation: Tensor, rate: float) -> Tensor:
    """C ← (1 − r)·C + r·tanh(corr), in place; `correlation` is overwritten."""
    if context.dtype == correlation.dtype:
        return context.lerp_(correlation.tanh_(), rate)
    # In a low precision a step of 0.01 would be rounded away.
    return context.copy_(context.to(correlation.dtype).lerp_(correlation.tanh_(), rate))


def _correlate(
    x: Tensor, y: Tensor, dtype: torch.dtype, out: Tensor | None = None, denominator: Tensor | None = None
) -> Tensor:
    """Returns the correlations of each channel of x with each of y, between -1 and 1; `denominator` is scratch.

    Channels are divided by their largest value before they are centred, so that no square overflows and a constant
    channel becomes exactly 0.
    """
    rows = torch.stack((_sample(x), _sample(y))).nan_to_num_(0.0, 0.0, 0.0)
    tiny = torch.finfo(rows.dtype).tiny
    largest = torch.linalg.vector_norm(rows, float("inf"), dim=1, keepdim=True)
    rows = rows.div_(largest.clamp_min(tiny))
    rows -= rows.mean(1, keepdim=True)
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    x_unit, y_unit = rows.div_(norm.clamp_min(tiny)).to(dtype)
    x_norm, y_norm = (norm * largest).squeeze(1).to(dtype)
    out = torch.mm(x_unit.t(), y_unit, out=out)
    large = torch.gt(torch.outer(x_norm, y_norm, out=denominator), SMALLEST, out=denominator)
    return out.mul_(large)


def _sample(x: Tensor) -> Tensor:
    """Returns at most 32 rows of x, evenly spaced, in float64 if the device has it."""
    rows = x.shape[:-1].numel()
    n = min(rows, ROWS)
    step = max(1, rows // n)
    if x.is_contiguous():
        sampled = x.view(rows, x.shape[-1])[: n * step : step]
    else:  # where flattening would copy the whole map
        sampled = x[torch.unravel_index(torch.arange(0, n * step, step, device=x.device), x.shape[:-1])]
    return sampled.to(_accumulation_dtype(x))


def _scale(strength: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Returns s/D as a tensor: reading its value would synchronize with the GPU."""
    return strength.reshape(()).to(torch.promote_types(dtype, torch.float32)) / width


def _at_least(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the tensor in its own dtype or in `dtype`, whichever is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, dtype))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Returns Σ a⊙b, summed in float64 if the device has it, a chunk of rows at a time."""
    dtype = _accumulation_dtype(a)
    total = torch.zeros((), dtype=dtype, device=a.device)
    rows = max(1, CHUNK.get(a.device.type, 1 << 17) // max(1, a.shape[1]))
    shape = (min(rows, a.shape[0]), a.shape[1])
    with (
        workspace.default.borrow("context.a", shape, dtype=dtype, device=a.device) as left,
        workspace.default.borrow("context.b", shape, dtype=dtype, device=a.device) as right,
    ):
        for a_rows, b_rows in zip(a.split(rows), b.split(rows), strict=True):
            pair = [buffer.tensor[: len(a_rows)] for buffer in (left, right)]
            pair[0].copy_(a_rows)
            pair[1].copy_(b_rows)
            total += torch.dot(pair[0].view(-1), pair[1].view(-1))
    return total


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    """Returns float64 if the device has it, else float32."""
    return torch.float32 if x.device.type == "mps" else torch.float64
