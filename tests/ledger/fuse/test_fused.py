"""Chains that are replayed as one kernel: structure, IEEE arithmetic under the interpreter, and the machine code."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")

from leangrad.kernels.pointwise import BLOCK, OPTIONS, Input, Program, Step, compiled  # noqa: E402
from tests.support.interpreter import run_interpreted  # noqa: E402


@pytest.mark.slow
def test_chains_under_the_interpreter() -> None:
    run_interpreted("fused_cases.py", "all chains agree")


@pytest.mark.gpu
def test_chains_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from leangrad.ledger.fuse import fused
    from tests.support import fused_cases

    monkeypatch.setattr(fused, "MIN_BYTES", 0)
    fused_cases.check_recipes("cuda")


def machine_code(program: Program) -> list[str]:
    """The instructions that Triton makes of ``program`` for an H100; that needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
    kernel = compiled(program).jitted
    signature = {f"x{k}": names[i.dtype] for k, i in enumerate(program.inputs)}
    signature |= {f"s{k}": "fp32" for k in range(program.scalars)}
    signature |= {f"y{k}": names[program.steps[k].dtype] for k in program.outputs}
    signature |= {"n": "i32", "start": "i32", "BLOCK": "constexpr"}
    made = triton.compile(
        ASTSource(kernel, signature, {"BLOCK": BLOCK}), target=GPUTarget("cuda", 90, 32), options=dict(OPTIONS)
    )
    found = re.findall(r"^\s+(?:@%p\d+ )?([a-z]\w*(?:\.\w+)+)\s", made.asm["ptx"], flags=re.MULTILINE)
    return [name for name in found if not name.startswith(("ld.", "st.", "mov.", "cvt.u", "mul.wide"))]


def test_arithmetic_is_what_is_written() -> None:
    """Float32 throughout, nothing contracted, nothing flushed to zero, rounding by the instruction that rounds."""
    half, single = torch.bfloat16, torch.float32
    steps = (
        Step("mul", (0, 1), half),
        Step("add", (3, 0), half),
        Step("div", (4, 2), single),
        Step("layer_norm", (5, 0, 1, 0, 1), half),
        Step("sqrt", (6,), single),
    )
    code = machine_code(Program((Input(half), Input(half)), 1, steps, (0, 3, 4)))
    arithmetic = {name for name in code if "f32" in name or "f16" in name}
    exact = {f"{op}.rn.f32" for op in ("add", "div", "fma", "mul", "sqrt", "sub")}
    assert arithmetic == exact | {"cvt.f32.bf16", "cvt.rn.bf16x2.f32"}
    per_step = code.count("sqrt.rn.f32")
    assert code.count("fma.rn.f32") == per_step  # the one of the layer norm
    assert code.count("mul.rn.f32") == 2 * per_step
    assert code.count("add.rn.f32") == per_step


@pytest.mark.parametrize("op", ["tanh", "gelu", "silu", "exp", "rsqrt"])
def test_functions_keep_denormals(op: str) -> None:
    """libdevice in its form that flushes nothing, but for the two approximations that CUDA itself flushes in."""
    code = machine_code(Program((Input(torch.float32),), 0, (Step(op, (0,), torch.float32),), (0,)))
    assert {name for name in code if ".ftz" in name} <= {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"}
