"""Cross entropy of a linear map's outputs, chunk by chunk: the logits never exist as a whole.

    z = s·(x Wᵀ + b)      y = cap·tanh(z/cap)      L = logsumexp_v y_v      p = exp(y − L)
    nll  = (1−ε)·w_t·(L − y_t) + ε/V·Σ_v w_v·(L − y_v)                       t is the target, w are the class weights

and the gradients of Σ_i r_i·(nll_i + c·L_i²), for a factor r_i per token:

    dy_v = r·[((1−ε)·w_t + ε/V·Σw + 2·c·L)·p_v − ε/V·w_v − (1−ε)·w_t·[v = t]]
    du   = dy·(1 − tanh²)        u = z before the cap
    dx = s·du W      dW = s·duᵀ x      db = s·Σ du      ds = Σ du·(x Wᵀ + b)

A chunk is some rows of x. Its logits are one product; `du` is written over them, and two more products give dx and dW,
so that nothing is computed twice. Sums and gradients are float32, or float64 if x is, whatever the dtype of x and W:
the caller multiplies the gradients by its factor, and rounds once. Logits have the same dtype, except for bfloat16 on
a GPU.

[Note: products] In float32 and float64 the products are those of plain PyTorch. In half precision CUDA multiplies x and
W as they are and returns float32; `du` is then rounded to their dtype, as in plain PyTorch. Where the kernels apply,
bfloat16 logits are rounded too, again as in plain PyTorch: they use half of the memory, and half as much is read and
written. (float16 could overflow.) A CPU has no such product: there x and one block of W at a time are widened. (Its own
half-precision products would round each chunk's share of dW before it is added, and dx before it is multiplied by the
factor: with that of `du` three roundings, where plain PyTorch has two.)

[Note: float16] `du` of a typical model is full of entries near p/V, far below what float16 resolves. It is multiplied
by a power of two, `unit`, which keeps its largest possible entry below 2¹⁴; the caller divides by it.

Nothing here uses autograd. On CUDA `leangrad.kernels.loss` turns logits into `du`; the code below is for all else.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leangrad.kernels import kernels_of, serves
from leangrad.ops.linear import write_wider, writes_wider

__all__ = ["Gradients", "Problem", "chunk_bytes", "chunk_rows", "gradients", "losses"]

# Logits of a chunk: on a GPU 512 MiB in float32 and 256 in bfloat16, enough for products at full speed (`chunk_rows`
# may double it where the weight has a gradient); 64 MiB on a CPU.
CHUNK_LOGITS = {"cuda": 1 << 27, "cpu": 1 << 24}
# A chunk's logits take no more memory than W in float32; but a chunk has no fewer rows than these.
LEAST_ROWS = 256
# Elements of W that are widened, or multiplied on a CPU, at once.
BLOCK = 1 << 20


class Problem(NamedTuple):
    """The inputs of a loss: x (N, D), weight (V, D), bias (V,), target (N,), class_weight (V,), scale ().

    x, weight and bias have one dtype; class_weight and scale that of the logits.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    scale: Tensor | None
    softcap: float | None
    label_smoothing: float
    ignore_index: int


class Gradients(NamedTuple):
    """The gradients, None if not needed. The caller must multiply dx, dW and db by s/unit, and ds by 1/unit."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    unit: Tensor | None  # see [Note: float16]; None is 1


def logits_dtype(x: Tensor) -> torch.dtype:
    """Returns float64 for a float64 `x`, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def chunk_rows(
    tokens: int, hidden: int, vocabulary: int, device_type: str, *, itemsize: int = 4, needs_weight: bool = False
) -> int:
    """Returns the number of rows of a chunk: chunks have nearly the same size, a multiple of 64 where possible.

    itemsize: of a logit, in bytes.
    needs_weight: dW is needed. Every chunk reads and writes all of dW, so that on a GPU larger chunks pay, up to those
        whose logits use as much memory as the rounded dW will.

    >>> chunk_rows(8192, 4096, 128256, "cuda"), chunk_rows(8192, 64, 1000, "cpu"), chunk_rows(7, 64, 1000, "cpu")
    (1024, 256, 7)
    >>> chunk_rows(8192, 4096, 128256, "cuda", needs_weight=True)
    2048
    """
    logits = CHUNK_LOGITS.get(device_type, CHUNK_LOGITS["cpu"])
    most = min(max(1, logits // max(1, vocabulary)), max(4 * hidden // itemsize, LEAST_ROWS))
    if needs_weight and device_type == "cuda":
        most = max(most, min(2 * logits // max(1, vocabulary), hidden // 2))
    most = most // 64 * 64 or most
    if tokens <= most:
        return max(1, tokens)
    even = math.ceil(tokens / math.ceil(tokens / most))
    return min(most, math.ceil(even / 64) * 64)


def chunk_bytes(
    tokens: int, hidden: int, vocabulary: int, device_type: str, dtype: torch.dtype, *, needs_weight: bool = False
) -> int:
    """Returns the bytes of the logits of one chunk, for x and weight in `dtype`; see [Note: products].

    >>> chunk_bytes(8192, 2048, 128256, "cuda", torch.bfloat16, needs_weight=True) >> 20
    250
    """
    rounds = device_type == "cuda" and dtype == torch.bfloat16
    itemsize = 2 if rounds else 8 if dtype == torch.float64 else 4
    rows = chunk_rows(tokens, hidden, vocabulary, device_type, itemsize=itemsize, needs_weight=needs_weight)
    return rows * vocabulary * itemsize


def losses(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns nll and logsumexp of every token, (N,); both are 0 where the target is ignored.

    >>> x, weight, target = torch.zeros(2, 3), torch.ones(4, 3), torch.tensor([1, -100])
    >>> losses(Problem(x, weight, None, target, None, None, None, 0.0, -100))[0]
    tensor([1.3863, 0.0000])
    """
    chunks = _Chunks(problem)
    for rows in chunks.slices():
        chunks.write_losses(rows)
    return chunks.nll, chunks.logsumexp


def gradients(
    problem: Problem,
    factors: Tensor | None,
    z_loss: Tensor | None,
    *,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor, Tensor, Gradients]:
    """Returns the results of `losses`, and the gradients; `needs`: which of x, weight, bias and scale need one.

    factors: r of the formulas, (N,), 1 where None; z_loss: c, 0-dimensional, 0 where None.

    >>> x, weight, target = torch.zeros(2, 3), torch.ones(4, 3), torch.tensor([1, -100])
    >>> problem = Problem(x, weight, None, target, None, None, None, 0.0, -100)
    >>> gradients(problem, None, None, needs=(True, False, False, False))[2].x
    tensor([[0., 0., 0.],
            [0., 0., 0.]])
    """
    x, weight, dtype = problem.x, problem.weight, logits_dtype(problem.x)
    needs_x, needs_weight, needs_bias, needs_scale = needs
    chunks = _Chunks(problem, z_loss, needs_weight=needs_weight, needs_scale=needs_scale)
    if factors is not None:  # that of an ignored row may be NaN
        factors = torch.where(problem.target != problem.ignore_index, factors, 0)
    unit = _unit(problem, factors, z_loss) if chunks.product_dtype == torch.float16 else None
    factors = torch.ones_like(chunks.nll) if factors is None else factors.to(dtype)
    factors = (factors if unit is None else factors * unit).contiguous()  # the kernels read it by address
    dx = torch.empty(x.shape, dtype=dtype, device=x.device) if needs_x else None
    first = torch.empty if len(x) else torch.zeros
    dW = first(weight.shape, dtype=dtype, device=x.device) if needs_weight else None
    db = torch.zeros(len(weight), dtype=dtype, device=x.device) if needs_bias else None
    for rows in chunks.slices():
        du = chunks.write_gradients(rows, factors[rows])
        if dx is not None:
            chunks.multiply_by_weight(du, dx[rows])
        if dW is not None:
            chunks.add_outer_product(du, rows, dW)
        if db is not None:
            db += du.sum(0, dtype=dtype)
    ds = chunks.dscale.sum() if chunks.dscale is not None else None
    return chunks.nll, chunks.logsumexp, Gradients(dx, dW, db, ds, unit)


def _unit(problem: Problem, factors: Tensor | None, z_loss: Tensor | None) -> Tensor:
    """Returns the power of two by which `du` is multiplied, 0-dimensional; see [Note: float16]."""
    largest = torch.ones((), device=problem.x.device)
    if problem.class_weight is not None:
        largest = problem.class_weight.abs().amax()
    if z_loss is not None:
        largest = largest + 2048 * z_loss.abs()  # 2·c·L: a logsumexp of 1024 is beyond any model
    if factors is not None and len(factors):
        largest = largest * factors.float().abs().amax()
    exponent = torch.frexp(largest.clamp(1e-30, 1e30)).exponent
    return torch.exp2((14 - exponent).float())


class _Chunks:
    """One pass over the chunks of a problem, and the buffers that all chunks share."""

    def __init__(
        self, problem: Problem, z_loss: Tensor | None = None, *, needs_weight: bool = False, needs_scale: bool = False
    ) -> None:
        x, weight = problem.x, problem.weight
        self.problem, self.z_loss = problem, z_loss
        self.dtype = dtype = logits_dtype(x)
        self.wider = x.dtype != dtype and writes_wider(x.device, x.dtype, dtype)  # products can be in `dtype`
        self.widens = x.dtype != dtype and not self.wider  # x and W have to be cast to `dtype` first
        self.product_dtype = x.dtype if self.wider else dtype  # of `du`
        self.kernels = kernels_of("loss.cross_entropy") if serves(x) else None
        rounds = self.wider and self.kernels is not None and x.dtype == torch.bfloat16
        logits = x.dtype if rounds else dtype
        self.step = chunk_rows(
            len(x), x.shape[1], len(weight), x.device.type, itemsize=logits.itemsize, needs_weight=needs_weight
        )
        # Each row begins at a multiple of 64 bytes: otherwise products and loads are slow on a GPU.
        self.stride = math.ceil(len(weight) / 32) * 32 if x.is_cuda else len(weight)
        self.buffer = torch.empty(self.step, self.stride, dtype=logits, device=x.device)
        self.nll = torch.empty(len(x), dtype=dtype, device=x.device)
        self.logsumexp = torch.empty_like(self.nll)
        self.dscale = torch.empty_like(self.nll) if needs_scale else None
        self.class_sum: Tensor | float = len(weight)
        if problem.class_weight is not None and problem.label_smoothing > 0:
            self.class_sum = problem.class_weight.sum()

    def slices(self) -> list[slice]:
        n = len(self.problem.x)
        return [slice(first, min(n, first + self.step)) for first in range(0, n, self.step)]

    # Products

    def _rows(self, rows: slice) -> Tensor:
        x = self.problem.x[rows]
        return x.to(self.dtype) if self.widens else x

    def _blocks(self) -> list[slice]:
        """Returns the blocks of rows of W that are widened, or multiplied on a CPU, at once."""
        count, hidden = self.problem.weight.shape
        step = max(1, BLOCK // max(1, hidden))
        return [slice(first, min(count, first + step)) for first in range(0, count, step)]

    def _parts(self) -> list[slice]:
        """Returns the ranges of classes that are multiplied at once.

        Tensor cores are used only for a multiple of 8 classes, so a remainder is a range of its own.
        """
        count = len(self.problem.weight)
        even = count // 64 * 64 if count % 8 else count
        return [slice(first, last) for first, last in ((0, even), (even, count)) if last > first]

    def products(self, rows: slice) -> Tensor:
        """Returns x Wᵀ, in the shared buffer."""
        x, weight = self._rows(rows), self.problem.weight
        z = self.buffer[: len(x), : len(weight)]
        if self.wider and z.dtype != x.dtype:
            for part in self._parts():
                write_wider(x, weight[part].t(), z[:, part], add=False)
        elif self.wider:
            for part in self._parts():
                torch.mm(x, weight[part].t(), out=z[:, part])
        elif x.is_cuda and not self.widens:
            torch.mm(x, weight.t(), out=z)
        else:  # in float32 too: some CPUs' libraries copy the transposed factor
            for block in self._blocks():
                torch.mm(x, weight[block].to(self.dtype).t(), out=z[:, block])
        return z

    def multiply_by_weight(self, du: Tensor, into: Tensor) -> None:
        """Write du W into `into`."""
        weight = self.problem.weight
        if self.wider:
            for part in self._parts():
                write_wider(du[:, part], weight[part], into, add=part.start > 0)
        elif not self.widens:
            torch.mm(du, weight, out=into)
        else:
            into.zero_()
            for block in self._blocks():
                into.addmm_(du[:, block], weight[block].to(self.dtype))

    def add_outer_product(self, du: Tensor, rows: slice, into: Tensor) -> None:
        """Add duᵀ x to `into`; the first chunk overwrites it."""
        x, is_first = self._rows(rows), rows.start == 0
        if self.wider:
            write_wider(du.t(), x, into, add=not is_first)
        elif is_first:
            torch.mm(du.t(), x, out=into)
        else:
            into.addmm_(du.t(), x)

    # Logits

    def write_losses(self, rows: slice) -> None:
        """Write nll and logsumexp of these rows."""
        z = self.products(rows)
        if self.kernels is not None:
            self.kernels.cross_entropy(self._call(rows), z)
            return
        self._nll(rows, self._logits(z)[0])

    def write_gradients(self, rows: slice, factors: Tensor) -> Tensor:
        """Write nll and logsumexp of these rows; returns `du`, which is written over the logits."""
        z = self.products(rows)
        if self.kernels is not None:
            du = self.buffer.view(self.product_dtype)[: len(z), : z.shape[1]]
            self.kernels.cross_entropy(self._call(rows), z, factors, du)
            return du
        raw = None if self.dscale is None else z.clone()
        y, tanh = self._logits(z, keeps_tanh=True, raw=raw)
        du = self._softmax_backward(rows, y, factors)
        if tanh is not None:
            du.mul_(tanh.square_().neg_().add_(1))
        if raw is not None and self.dscale is not None:
            torch.sum(raw.mul_(du), 1, out=self.dscale[rows])
        return du.to(self.product_dtype)

    def _call(self, rows: slice) -> Any:
        assert self.kernels is not None
        p = self.problem
        return self.kernels.Rows(
            target=p.target[rows], bias=p.bias, class_weight=p.class_weight, class_sum=self.class_sum, scale=p.scale,
            z_loss=self.z_loss, softcap=p.softcap, label_smoothing=p.label_smoothing, ignore_index=p.ignore_index,
            nll=self.nll[rows], logsumexp=self.logsumexp[rows],
            dscale=None if self.dscale is None else self.dscale[rows],
        )  # fmt: skip

    def _logits(self, z: Tensor, keeps_tanh: bool = False, raw: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns y, computed over x Wᵀ in `z`, and tanh(u/cap), if `keeps_tanh`; x Wᵀ + b is left in `raw`."""
        p = self.problem
        if p.bias is not None:
            z += p.bias
        if raw is not None:
            raw.copy_(z)
        if p.scale is not None:
            z *= p.scale
        if p.softcap is None:
            return z, None
        z.div_(p.softcap).tanh_()
        tanh = z.clone() if keeps_tanh else None
        return z.mul_(p.softcap), tanh

    def _nll(self, rows: slice, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Write nll and logsumexp; y becomes exp(y − max).

        Returns, for each row: the sum of that, the column of the target, its weight, and whether the target counts.
        """
        p, epsilon = self.problem, self.problem.label_smoothing
        valid = p.target[rows] != p.ignore_index
        column = p.target[rows].masked_fill(~valid, 0).unsqueeze(1)
        of_target = valid.to(self.dtype) if p.class_weight is None else p.class_weight[column.squeeze(1)] * valid
        y_target = y.gather(1, column).squeeze(1)
        weighted = None
        if epsilon > 0:
            weighted = y.sum(1) if p.class_weight is None else y.mv(p.class_weight)
        highest = y.amax(1, keepdim=True)
        total = y.sub_(highest).exp_().sum(1, keepdim=True)
        logsumexp = (highest + total.log()).squeeze(1)
        nll = (1 - epsilon) * of_target * (logsumexp - y_target)
        if weighted is not None:
            nll += epsilon / y.shape[1] * (self.class_sum * logsumexp - weighted)
        self.nll[rows] = nll.masked_fill_(~valid, 0)
        self.logsumexp[rows] = logsumexp.masked_fill(~valid, 0)
        return total, column, of_target, valid

    def _softmax_backward(self, rows: slice, y: Tensor, factors: Tensor) -> Tensor:
        """Returns `dy`, written over y."""
        p, epsilon, count = self.problem, self.problem.label_smoothing, y.shape[1]
        total, column, of_target, valid = self._nll(rows, y)
        factors = factors * valid
        share = (1 - epsilon) * of_target + epsilon / count * self.class_sum
        if self.z_loss is not None:
            share = share + 2 * self.z_loss * self.logsumexp[rows]
        y.mul_((share * factors).unsqueeze(1) / total)
        if epsilon > 0:
            each = epsilon / count * factors
            if p.class_weight is None:
                y.sub_(each.unsqueeze(1))
            else:
                y.addr_(each, p.class_weight, alpha=-1)
        return y.scatter_add_(1, column, ((epsilon - 1) * of_target * factors).unsqueeze(1))
