"""Compiles a chain of pointwise ops to one Triton kernel, with the bits that ATen's own kernels give op by op.

[Note: the same bits in one kernel]
One kernel can give the same bits as many for these reasons:

- ATen computes a pointwise op in float32 (its "opmath") and rounds the result to the op's dtype. A step does the same.
- float32 ``+ - *``, division, square root and fma are defined to the last bit by IEEE 754. Contraction of ``a * b + c``
  to an fma is switched off; where nvcc contracts *inside* one of ATen's kernels, the fma is written out.
- Rounding to bfloat16 and float16 is one machine instruction, written as inline assembly: the compiler could narrow
  a cast (``round(float(a) * float(b))`` becomes a bfloat16 product, which differs for denormals).
- tanh, exp and rsqrt are libdevice's, the library that nvcc links into ATen, in the form that keeps denormals. The erf
  of CUDA 13 has other coefficients than that of the libdevice in Triton 3.6, and is written out.
- Norms are computed from the statistics that autograd saves: no sum is computed a second time.

All of this is checked: tests try every bfloat16, every float16 and every float32 input of the unary ops, and
``ledger/fuse/fused.py`` compares each new program with ATen on real data, bit for bit, before using it.
"""

# mypy: disable-error-code="no-untyped-def,no-redef"

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from leangrad.kernels import INTERPRETED, codegen
from leangrad.kernels.launch import Launch

__all__ = ["OPS", "Input", "Kernel", "Program", "Step", "compiled", "source"]

BLOCK, WARPS = 1024, 4  # elements per Triton program: 8 per thread, one 16-byte load of a 16-bit map
OPTIONS: dict[str, Any] = {} if INTERPRETED else {"enable_fp_fusion": False, "enable_reflect_ftz": False}
ROUNDED = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

# ---- functions that the table uses ----------------------------------------------------------------------------------

if INTERPRETED:  # The interpreter has neither libdevice nor assembly: these replace them in tests of the structure.

    @triton.jit
    def tanh(x):
        """An approximation, enough for tests of the structure."""
        return 1.0 - tl.div_rn(2.0, 1.0 + tl.exp(2.0 * x))

    @triton.jit
    def exp(x):
        """An approximation, enough for tests of the structure."""
        return tl.exp(x)

    @triton.jit
    def erf(x):
        """An approximation, enough for tests of the structure."""
        return tl.erf(x)

    @triton.jit
    def rsqrt(x):
        """An approximation, enough for tests of the structure."""
        return tl.rsqrt(x)

    @triton.jit
    def bfloat16(x):
        """Round to nearest, ties to even; the interpreter's own cast truncates."""
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, float("nan")).to(tl.bfloat16)

    @triton.jit
    def float16(x):
        """Round to nearest, ties to even."""
        return x.to(tl.float16)

else:
    from triton.language.extra.cuda import libdevice
    from triton.language.extra.cuda.libdevice import exp, rsqrt, tanh

    @triton.jit
    def exp2(x):
        """2^x by the instruction itself."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def erf_of_cuda_13(x):
        """A polynomial in x² near 0, 1 − 2^(a polynomial in |x|) further out, in float32 and fma throughout."""
        size = tl.abs(x)
        far = size >= 1.002959966659546
        t = tl.where(far, size, x * x)
        p = tl.where(far, 0.00011219871521461755, 8.483494457323104e-05)
        p = tl.fma(p, t, tl.where(far, -0.0013275252422317863, -0.0008213091641664505))
        p = tl.fma(p, t, tl.where(far, 0.00839653518050909, 0.005213488824665546))
        p = tl.fma(p, t, tl.where(far, -0.04024658352136612, -0.026868773624300957))
        p = tl.fma(p, t, tl.where(far, 0.15950430929660797, 0.11284004896879196))
        p = tl.fma(p, t, tl.where(far, 0.9129176735877991, -0.37612664699554443))
        p = tl.fma(p, t, tl.where(far, 0.6290600299835205, 0.12837915122509003))
        s = tl.where(far, size * -1.0, x)
        near = tl.fma(p, s, s)
        y = 1.0 - exp2(near)
        return tl.where(far, tl.where(x < 0, y * -1.0, y), near)

    # For larger |x| the erf of CUDA 13 has other coefficients than the libdevice that Triton 3.6 ships.
    erf = erf_of_cuda_13 if int((torch.version.cuda or "0").split(".")[0]) >= 13 else libdevice.erf

    @triton.jit
    def bfloat16(x):
        """Round to nearest, ties to even."""
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )

    @triton.jit
    def float16(x):
        """Round to nearest, ties to even."""
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def clamp(x, low, high):
    """min(max(x, low), high), where NaN stays NaN, and +0 is greater than −0."""
    return tl.minimum(tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL), high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x)). nvcc contracts the sum, without effect: exp ends in a product with a power of two."""
    return tl.div_rn(1.0, 1.0 + exp(x * -1.0))


@triton.jit
def silu(x):
    """x / (1 + exp(−x))."""
    return tl.div_rn(x, 1.0 + exp(x * -1.0))


@triton.jit
def gelu(x):
    """x·½·(1 + erf(x/√2))."""
    return x * 0.5 * (1.0 + erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    """½x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * tl.fma(x * x * x, 0.044715, x)))


FUNCTIONS = {f.__name__: f for f in (bfloat16, float16, clamp, sigmoid, silu, gelu, gelu_tanh)}
FUNCTIONS |= {"tl": tl, "tanh": tanh, "erf": erf, "exp": exp, "rsqrt": rsqrt}

# ---- the table: one line per op, over float32 operands ---------------------------------------------------------------

OPS = {
    "cast": "{0}",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "tl.div_rn({0}, {1})",
    "neg": "{0} * -1.0",  # Triton's own minus computes 0 − x, which gives +0 for +0 instead of −0
    "relu": "tl.maximum({0}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    "leaky_relu": "tl.where({0} > 0, {0}, {0} * {1})",
    "clamp": "clamp({0}, {1}, {2})",
    "clamp_min": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "clamp_max": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "hardswish": "{0} * clamp({0} + 3.0, 0.0, 6.0) * 0.16666666666666666",
    "hardsigmoid": "clamp({0} + 3.0, 0.0, 6.0) * 0.16666666666666666",
    "abs": "tl.abs({0})",
    "reciprocal": "tl.div_rn(1.0, {0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "rsqrt({0})",
    "exp": "exp({0})",
    "tanh": "tanh({0})",
    "sigmoid": "sigmoid({0})",
    "silu": "silu({0})",
    "gelu": "gelu({0})",
    "gelu_tanh": "gelu_tanh({0})",
    "where": "tl.where({0}, {1}, {2})",
    # x, mean, rstd, weight, bias
    "layer_norm": "tl.fma({3}, {2} * ({0} - {1}), {4})",
    "layer_norm_no_bias": "{3} * ({2} * ({0} - {1}))",
    "layer_norm_bare": "{2} * ({0} - {1})",
    "batch_norm": "tl.fma({3} * ({0} - {1}), {2}, {4})",
    "batch_norm_scaled": "tl.fma({0} - {1}, {3} * {2}, {4})",
    "batch_norm_folded": "tl.fma({0}, {3} * {2}, {4} - {1} * ({3} * {2}))",
    # x, rstd, weight
    "rms_norm": "{2} * ({1} * {0})",
    "rms_norm_bare": "{1} * {0}",
}

# ---- programs -------------------------------------------------------------------------------------------------------

Term = tuple[int, int, int]


class Input(NamedTuple):
    """A tensor that a program reads, and the position in it of the operand for element i of the output.

    ``terms`` None: the position is i. Otherwise it is the sum of ``(i // inner) % size * stride`` over the terms
    ``(inner, size, stride)``. Size 0: the term has no remainder, as it belongs to the outermost dimension. No terms:
    the position is always the same.
    """

    dtype: torch.dtype
    terms: tuple[Term, ...] | None = None


class Step(NamedTuple):
    """One op. Its operands are numbered: first all inputs, then all scalars, then the steps before this one."""

    op: str
    operands: tuple[int, ...]
    dtype: torch.dtype


class Program(NamedTuple):
    """A chain of pointwise ops over one element index i.

    >>> half, x = torch.bfloat16, Input(torch.float32)
    >>> scaled = Program((x,), 1, (Step("mul", (0, 1), torch.float32), Step("cast", (2,), half)), (1,))
    """

    inputs: tuple[Input, ...]
    scalars: int  # how many
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]  # indices of steps
    places: tuple[tuple[Term, ...] | None, ...] = ()  # for each output: the terms of element i, as in `Input`


def source(program: Program, wide: bool) -> str:
    """The Triton source of the kernel of ``program``; ``wide``: offsets need 64 bits."""
    inputs = [f"x{k}" for k in range(len(program.inputs))]
    scalars = [f"s{k}" for k in range(program.scalars)]
    outputs = [f"y{k}" for k in program.outputs]
    places = dict(zip(program.outputs, program.places, strict=False))
    names = [f"v{k}" for k in range(len(inputs))] + scalars + [f"r{k}" for k in range(len(program.steps))]
    lines = [
        f"def fused({', '.join([*inputs, *outputs, *scalars])}, n, start, BLOCK: tl.constexpr):",
        f"    block = tl.program_id(0){'.to(tl.int64)' if wide else ''} * BLOCK",
        "    first = start + block",
        "    j = block + tl.arange(0, BLOCK)",
        "    inside = j < n",
        "    i = start + j",
    ]
    for k, (dtype, terms) in enumerate(program.inputs):
        if _is_one_per_block(dtype, terms):
            lines.append(f"    v{k} = tl.full((BLOCK,), tl.load(x{k} + {_place(terms, 'first')}), tl.float32)")
            continue
        cast = "" if dtype is torch.bool else ".to(tl.float32)"
        lines.append(f"    v{k} = tl.load(x{k} + {_place(terms, 'i')}, mask=inside){cast}")
    for k, (op, operands, dtype) in enumerate(program.steps):
        value = OPS[op].format(*(names[o] for o in operands))
        if dtype is torch.float32:
            result = f"r{k}"
            lines.append(f"    r{k} = {value}")
        else:
            result = f"h{k}"
            lines += [f"    h{k} = {ROUNDED[dtype]}({value})", f"    r{k} = h{k}.to(tl.float32)"]
        if k in program.outputs:
            terms = places.get(k)
            lines.append(f"    tl.store(y{k} + {'j' if terms is None else _place(terms, 'i')}, {result}, mask=inside)")
    return "\n".join(lines) + "\n"


def _is_one_per_block(dtype: torch.dtype, terms: tuple[Term, ...] | None) -> bool:
    """Whether all elements of a block read the same element of the input, for example a statistic of their row."""
    return dtype is not torch.bool and terms is not None and all(inner % BLOCK == 0 for inner, _, _ in terms)


def _place(terms: tuple[Term, ...] | None, at: str) -> str:
    if terms is None:
        return at
    parts = []
    for inner, size, stride in terms:
        part = at if inner == 1 else f"({at} // {inner})"
        part = f"{part} % {size}" if size else part
        parts.append(part if stride == 1 else f"({part}) * {stride}")
    return "(" + " + ".join(parts or [f"{at} * 0"]) + ")"


class Kernel:
    """The kernel of one program. Triton compiles it for each combination of alignments and dtypes, and caches these."""

    def __init__(self, program: Program, wide: bool) -> None:
        self.program = program
        scope = {**FUNCTIONS, "__name__": __name__}
        exec(codegen.compiled(source(program, wide), "fused"), scope)  # Triton reads the source through ``inspect``
        self.jitted = triton.jit(scope["fused"])

    def launch(self, inputs: list[Tensor], scalars: list[float], outputs: list[Tensor], n: int, start: int = 0) -> None:
        """Write elements ``start`` to ``start + n`` of every output of the program, each to its own flat memory.

        ``start`` must be a multiple of BLOCK if any input has terms. An output that has ``places`` is passed whole.
        """
        assert start % BLOCK == 0 or all(i.terms is None for i in self.program.inputs)
        self.jitted[(_blocks(n),)](*inputs, *outputs, *scalars, n, start, BLOCK=BLOCK, num_warps=WARPS, **OPTIONS)

    def launcher(self, device: torch.device, n: int) -> Launch:
        """A ``Launch`` of this kernel over all ``n`` elements, to be called repeatedly."""
        return Launch(self.jitted, device, (_blocks(n),), (n, 0, BLOCK), WARPS, **OPTIONS)


def _blocks(n: int) -> int:
    return (n + BLOCK - 1) // BLOCK


@cache
def compiled(program: Program, wide: bool = False) -> Kernel:
    """The kernel of ``program``, cached."""
    return Kernel(program, wide)
