"""The kernel of the loss against float64; run by test_loss_kernels.py, also as a script.

As a script, under `TRITON_INTERPRET=1`, the kernel takes CPU tensors. Shapes are small: the interpreter is slow.
"""

import itertools
import sys

import torch
from torch import Tensor

from leangrad.kernels import INTERPRETED, serves
from leangrad.kernels.loss.cross_entropy import BLOCK, Rows, cross_entropy
from leangrad.loss import linear_cross_entropy
from leangrad.loss.reference import Options, Tensors, plain_linear_cross_entropy
from tests.support import same_bits

# What float32 sums of a row are off by, relative to the largest entry; and one rounding of `du`. Triton's interpreter
# cuts bfloat16 off instead of rounding it: one place more.
SUMS = 2e-5
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-11}
SIZES = [(1, 1), (3, 2), (4, 257), (3, BLOCK + 5)]
ON = list(itertools.product((False, True), repeat=6))  # bias, class weights, scale, cap, smoothing, z-loss


def check_rows(
    n: int, V: int, on: tuple[bool, ...], dtype: torch.dtype, device: str, of_logits: torch.dtype = torch.float32
) -> None:
    """`du`, nll, logsumexp and dscale of random logits, one target ignored, against autograd in float64."""
    has_bias, has_class, has_scale, has_cap, has_smoothing, has_z_loss = on
    raw = (3 * torch.randn(n, V, device=device)).to(of_logits)
    bias = torch.randn(V, device=device) if has_bias else None
    classes = torch.rand(V, device=device) + 0.1 if has_class else None
    scale = torch.tensor(0.7, device=device) if has_scale else None
    coefficient = torch.tensor(0.01, device=device) if has_z_loss else None
    target = torch.randint(V, (n,), device=device)
    target[n // 2] = -100 if n > 1 else target[0]
    factors = torch.randn(n, device=device)
    cap, epsilon = (2.5 if has_cap else None), (0.1 if has_smoothing else 0.0)

    u = raw.double().requires_grad_()
    s = None if scale is None else scale.double().requires_grad_()
    logits = u if bias is None else u + bias.double()
    y = logits if s is None else logits * s
    y = y if cap is None else cap * torch.tanh(y / cap)
    weight = None if classes is None else classes.double()
    nll = torch.nn.functional.cross_entropy(y, target, weight, reduction="none", label_smoothing=epsilon)
    logsumexp = torch.where(target == -100, 0.0, torch.logsumexp(y, 1))
    total = nll if coefficient is None else nll + 0.01 * logsumexp.square()
    wanted = torch.autograd.grad((total * factors.double()).sum(), [u] if s is None else [u, s])
    truth = wanted[0] if s is None else wanted[0] / 0.7  # `du`: before it is multiplied by the scale

    stride = V + 3  # rows need not lie side by side
    buffer = torch.full((n, stride), float("nan"), dtype=of_logits, device=device)
    z = buffer[:, :V].copy_(raw)
    found = [torch.full((n,), float("nan"), device=device) for _ in range(3)]
    rows = Rows(
        target, bias, classes, V if classes is None else classes.sum(), scale, coefficient, cap, epsilon, -100,
        found[0], found[1], found[2] if has_scale else None,
    )  # fmt: skip
    assert serves(z)
    cross_entropy(rows, z)
    compare(found[0], nll, 0.0)
    compare(found[1], logsumexp, 0.0)
    assert same_bits(z, raw)
    if dtype == torch.float32:  # apart from the logits, with no room between its rows
        apart = torch.empty(n, V, device=device)
        cross_entropy(rows, z, factors, apart)
        compare(apart, truth, 0.0)
        assert same_bits(z, raw)
    du = buffer.view(dtype)[:, :V]
    cross_entropy(rows, z, factors, du)
    compare(found[0], nll, 0.0)
    compare(du, truth, ROUNDING[dtype])
    if has_scale:
        compare(found[2].sum(), wanted[1], 0.0)


def compare(found: Tensor, truth: Tensor, rounding: float) -> None:
    error = (found.double() - truth).abs() - rounding * truth.abs()
    smallest = 2.0**-24 if found.dtype == torch.float16 else 0.0
    assert error.max() <= SUMS * max(1.0, truth.abs().max().item()) + smallest


def check_whole(dtype: torch.dtype, device: str) -> None:
    """The function takes the kernel, chunk by chunk, and gives what plain float64 gives."""
    N, D, V = 300, 16, 40
    tensors = [torch.randn(*shape, device=device).to(dtype).requires_grad_() for shape in ((N, D), (V, D), (V,))]
    scale = torch.tensor(0.3, device=device, requires_grad=True)
    target = torch.randint(V, (N,), device=device)
    target[::7] = -100
    x, W, b = tensors
    loss = linear_cross_entropy(
        x, W, target, linear_bias=b, logit_scale=scale, softcap=4.0, z_loss=0.01, label_smoothing=0.1
    )
    loss.backward(torch.tensor(3.0, device=device))
    double = [t.detach().double().requires_grad_() for t in (*tensors, scale)]
    truth = plain_linear_cross_entropy(Tensors(*double, None, target), Options("mean", -100, 0.1, 0.01, 4.0))
    truth.backward(torch.tensor(3.0, device=device))
    rounds = dtype == torch.bfloat16 and x.is_cuda  # its logits, as plain's; tests/loss/test_error.py has the rule
    assert (loss - truth).abs() < (2**-10 if rounds else 1e-5) * truth
    for ours, other in zip((*tensors, scale), double, strict=True):
        assert ours.grad is not None and other.grad is not None  # noqa: PT018
        error = (ours.grad.double() - other.grad).norm() / other.grad.norm()
        assert error < (2e-5 if ours.dtype == torch.float32 and dtype == torch.float32 else 2e-2)


def check_gradients_of_each_row(device: str) -> None:
    """Without a reduction the gradient may have any strides: that of `.sum()` has stride 0."""
    x, W = torch.randn(40, 16, device=device), torch.randn(300, 16, device=device)
    target = torch.randint(300, (40,), device=device)
    for g in (torch.ones(1, device=device).expand(40), torch.randn(40, 2, device=device)[:, 1]):
        inputs = [t.detach().requires_grad_() for t in (x, W)]
        linear_cross_entropy(*inputs, target, reduction="none").backward(g)
        double = [t.detach().double().requires_grad_() for t in (x, W)]
        tensors = Tensors(*double, None, None, None, target)
        truth = plain_linear_cross_entropy(tensors, Options("none", -100, 0, 0, None))
        truth.backward(g.double())
        for ours, other in zip(inputs, double, strict=True):
            assert ours.grad is not None and other.grad is not None  # noqa: PT018
            assert (ours.grad.double() - other.grad).norm() < 2e-5 * other.grad.norm()


def check_target_outside(device: str) -> None:
    """The kernel alone makes the loss of a target that is no class NaN; the function asserts before it runs."""
    z = torch.zeros(2, 5, device=device)
    nll, logsumexp = torch.zeros(2, device=device), torch.zeros(2, device=device)
    target = torch.tensor([1, 5], device=device)
    cross_entropy(Rows(target, None, None, 5, None, None, None, 0.0, -100, nll, logsumexp, None), z)
    assert nll.isnan().tolist() == [False, True]


def check_minus_infinity(device: str) -> None:
    """Classes that a bias of −inf takes out, a whole block of them first."""
    V = BLOCK + 100
    bias = torch.zeros(V, device=device)
    bias[: BLOCK + 10] = float("-inf")
    z = torch.zeros(1, V, device=device)
    nll, logsumexp = torch.zeros(1, device=device), torch.zeros(1, device=device)
    target = torch.tensor([V - 1], device=device)
    rows = Rows(target, bias, None, V, None, None, None, 0.0, -100, nll, logsumexp, None)
    cross_entropy(rows, z, torch.ones(1, device=device), z)
    assert (nll - torch.tensor(90.0).log()).abs().item() < 1e-5
    assert z[0, : BLOCK + 10].eq(0).all()
    assert (z[0, BLOCK + 10 : -1] - 1 / 90).abs().max() < 1e-7


def check_all(device: str) -> None:
    """All of the above."""
    torch.manual_seed(0)
    for n, on in enumerate(ON):
        check_rows(2, 37, on, tuple(ROUNDING)[n % 3], device)
        if n % 5 == 0:
            check_rows(*SIZES[n % len(SIZES)], on, tuple(ROUNDING)[n % 3], device)
    check_rows(*SIZES[-1], (True,) * 6, torch.bfloat16, device)
    for (rows, V), dtype in itertools.product(SIZES, ROUNDING):
        check_rows(rows, V, (False,) * 6, dtype, device)
    for (rows, V), on in itertools.product(SIZES, (ON[0], ON[-1])):
        check_rows(rows, V, on, torch.bfloat16, device, of_logits=torch.bfloat16)
    for dtype in ROUNDING:
        check_whole(dtype, device)
    check_gradients_of_each_row(device)
    check_target_outside(device)
    check_minus_infinity(device)


if __name__ == "__main__":
    check_all("cpu")
    sys.stdout.write("all kernels agree\n")
