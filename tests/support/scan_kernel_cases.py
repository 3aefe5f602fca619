"""The kernels of the scan against the eager ops in float64; run by test_scan_kernels.py, also as a script.

As a script, under `TRITON_INTERPRET=1`, the kernels take CPU tensors. Shapes are tiny: the interpreter is slow.
"""

import sys

import torch
from torch import Tensor

from leangrad.kernels import scan as kernels
from leangrad.kernels import serves
from leangrad.nn.scan import rg_lru, selective_scan
from leangrad.ops import scan as ops

# (batch, T, width, N), chunk
TINY = {
    "one step": ((2, 1, 2, 1), 4),
    "one chunk, two tiles of channels": ((1, 4, 18, 1), 4),
    "a last chunk that is not full": ((2, 7, 3, 2), 4),
}
LARGE = {  # few: each is compiled anew
    "one chunk, not full": ((2, 7, 3, 2), 16),
    "long chunks": ((2, 300, 40, 3), 128),
    "many chunks": ((1, 2100, 96, 16), 32),
}


def case(form: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[ops.Scan, Tensor, Tensor, Tensor]:
    """A scan with everything that its form has, a start, and the gradients of z and of the end."""
    batch, T, width, N = shape
    torch.manual_seed(0)
    is_zoh = form == "zoh"
    N = N if is_zoh else 1
    maps = [torch.randn(batch, T, width), torch.rand(batch, T, width), torch.rand(batch, T, width)]
    A = torch.rand(N, width) * 4 + 1e-3
    A[0, 0] = 0
    maps[1][:, T // 2] = 30  # forgets all
    columns = [torch.randn(batch, T, N), torch.randn(batch, T, N)]
    start, end, dz = torch.randn(batch, N, width), torch.randn(batch, N, width), torch.randn(batch, T, width)
    maps, columns = ([t.to(device=device, dtype=dtype) for t in ts] for ts in (maps, columns))
    A, start, end, dz = (t.to(device) for t in (A, start, end, dz.to(dtype)))
    D = torch.randn(width, 2).to(device)[:, 1]  # strided, as a column of a user's table
    u, dt, gate = maps
    scan = ops.Scan(form, u, dt, A, *columns, D) if is_zoh else ops.Scan(form, u, dt, A, gate=gate)
    assert all(serves(x) for x in scan if isinstance(x, Tensor))
    return scan, start, end, dz


def close(what: str, ours: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of the largest value."""
    error = (ours.double() - truth).abs().max().item()
    allowed = 8 * max(torch.finfo(dtype).eps, 2e-7) * max(1.0, truth.abs().max().item())
    assert error <= allowed, f"{what}: {error:.2e} > {allowed:.2e}"


def check_ops(
    form: str, shape: tuple[int, ...], chunk: int, dtype: torch.dtype, device: str, *, has_end: bool = True
) -> None:
    """Kernels on these maps, eager ops on the same maps in float64, which the kernels do not serve."""
    scan, start, end, dz = case(form, shape, dtype, device)
    exact = ops.Scan(form, *(None if x is None else x.double() for x in scan[1:]))
    what = f"{form} {shape} in chunks of {chunk}, {dtype}"
    z, bounds = ops.forward(scan, start, chunk)
    exact_z, exact_bounds = ops.forward(exact, start.double(), chunk)
    close(f"z of {what}", z, exact_z, dtype)
    close(f"bounds of {what}", bounds, exact_bounds, torch.float32)
    ours = ops.backward(scan, bounds, dz, end if has_end else None, chunk)
    truth = ops.backward(exact, exact_bounds, dz.double(), end.double() if has_end else None, chunk)
    for name, g, exact_g in zip(ops.Gradients._fields, ours, truth, strict=True):
        assert (g is None) == (exact_g is None), name
        if g is not None:
            close(f"d{name} of {what}", g, exact_g, g.dtype)


def check_functions(device: str) -> None:
    """The differentiable functions, from strided inputs, with and without a state."""
    torch.manual_seed(0)
    u, dt, gate = torch.rand(3, 2, 4, 6, device=device).transpose(2, 3).unbind()  # (2, 6, 4), strided
    B, C, _ = torch.rand(2, 6, 5, device=device).split([2, 2, 1], 2)
    A, state = torch.rand(4, 2, device=device), torch.rand(2, 4, device=device)
    for call in (
        lambda u, dt, gate, B, C, A, state: selective_scan(u, dt, A, B, C, chunk=2),
        lambda u, dt, gate, B, C, A, state: rg_lru(u, dt, gate, A[:, 0], state, chunk=2),
        lambda u, dt, gate, B, C, A, state: rg_lru(u, dt, gate, A[:, 0], rms=True, chunk=2),
    ):
        found = []
        for dtype in (torch.float32, torch.float64):
            inputs = [t.to(dtype).requires_grad_() for t in (u, dt, gate, B, C, A, state)]
            outputs = call(*inputs)
            grads = [torch.linspace(-1, 1, y.numel(), device=device, dtype=dtype).view(y.shape) for y in outputs]
            found.append([*outputs, *torch.autograd.grad(outputs, inputs, grads, allow_unused=True)])
        for ours, truth in zip(*found, strict=True):
            if truth is not None:
                close("a function", ours.detach(), truth.detach(), torch.float32)


def check_all(device: str, shapes: dict[str, tuple[tuple[int, ...], int]]) -> None:
    for shape, chunk in shapes.values():
        check_ops("zoh", shape, chunk, torch.float32, device)
    for form in ("ema", "rms"):  # they differ in a formula only
        check_ops(form, shape, chunk, torch.float32, device)
    for dtype in (torch.bfloat16, torch.float16):
        check_ops("zoh", shape, chunk, dtype, device, has_end=False)
    check_functions(device)


def check_carry() -> None:
    """More chunks than one tile of the carrying kernel takes."""
    steps = kernels.CARRY_STEPS
    kernels.CARRY_STEPS = 2
    try:
        check_ops("zoh", (1, 9, 2, 2), 2, torch.float32, "cpu")
    finally:
        kernels.CARRY_STEPS = steps


if __name__ == "__main__":
    check_all("cpu", TINY)
    check_carry()
    print("all kernels agree", file=sys.stdout)
