"""The Triton kernel of the loss: under the interpreter everywhere, compiled where there is a GPU."""

import subprocess
import sys

import pytest
import torch

from tests.support import same_bits
from tests.support.interpreter import run_interpreted

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_under_the_interpreter() -> None:
    run_interpreted("loss_kernel_cases.py", "all kernels agree")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("on", [0b00000000, 0b00000010, 0b10101011, 0b01011110, 0b11111100, 0b11111111], ids=bin)
def test_kernel_compiles_for_a_gpu(on: int) -> None:
    """Without one: the interpreter does not check types."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from leangrad.kernels.loss.cross_entropy import _rows_kernel as kernel

    flags = [name for name in kernel.arg_names if name.startswith(("HAS_", "NEEDS_"))]
    constants = {name: bool(on >> n & 1) for n, name in enumerate(reversed(flags))} | {"BLOCK": 4096}
    types = {"target_ptr": "*i64", "du_ptr": "*bf16", "bias_ptr": "*bf16", "softcap": "fp32", "epsilon": "fp32"}
    signature = {name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "_rows_kernel" in compiled.asm["ptx"]


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    from tests.support import loss_kernel_cases

    loss_kernel_cases.check_all("cuda")


@pytest.mark.gpu
def test_results_do_not_depend_on_timing() -> None:
    """`du` is written over logits that other threads of the program may still have to read, if it forgot to wait."""
    from leangrad.kernels.loss.cross_entropy import Rows, cross_entropy

    logits = torch.randn(512, 50257, device="cuda")
    target = torch.randint(50257, (512,), device="cuda")
    nll, logsumexp, ones = (torch.ones(512, device="cuda") for _ in range(3))
    rows = Rows(target, None, None, 50257, None, None, None, 0.0, -100, nll, logsumexp, None)
    apart = torch.empty_like(logits, dtype=torch.bfloat16)
    cross_entropy(rows, logits, ones, apart)
    for _ in range(20):
        z = logits.clone()
        du = z.view(torch.bfloat16)[:, :50257]
        cross_entropy(rows, z, ones, du)
        assert same_bits(du.contiguous(), apart)


OUTSIDE = """
import torch, leangrad
x, w = torch.ones(2, 4, device="cuda"), torch.ones(5, 4, device="cuda")
leangrad.linear_cross_entropy(x, w, torch.tensor([1, 5], device="cuda")).item()
"""


@pytest.mark.gpu
def test_a_target_outside_is_an_assertion_on_a_gpu() -> None:
    """In a process of its own, whose CUDA context it ends."""
    result = subprocess.run([sys.executable, "-c", OUTSIDE], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "a target is no class of 5" in result.stderr + result.stdout
