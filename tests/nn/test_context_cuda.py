"""The attention context on CUDA, against float64 on the CPU."""

import pytest
import torch

from leangrad import workspace
from leangrad.nn.context import AttentionContext, update_context
from tests.support.context import plain

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cuda_follows_float64(dtype):
    torch.manual_seed(1)
    module = AttentionContext(96, rate=0.5, device="cuda", dtype=dtype)
    with torch.no_grad():
        module.strength.fill_(0.5)
    context = None
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    for _ in range(3):
        x = torch.randn(3, 50, 96, device="cuda", dtype=dtype, requires_grad=True)
        grad = torch.randn_like(x)
        truth = x.detach().double().cpu().requires_grad_()
        s = module.strength.detach().double().cpu().requires_grad_()
        expected = truth * 1 if context is None else plain(truth, context.clone(), s)
        found = module(x) * 1
        module.strength.grad = None
        found.backward(grad)
        expected.backward(grad.double().cpu())
        pairs = [(found, expected), (x.grad, truth.grad)]
        if context is not None:
            pairs.append((module.strength.grad, s.grad))
        module.update(x, x.tanh())
        context = update_context(x.detach().double().cpu(), x.detach().tanh().double().cpu(), 0.5, context)
        pairs.append((module.context, context))
        for one, other in pairs:
            assert (one.detach().double().cpu() - other.detach()).abs().max() <= tolerance * other.abs().max()


def test_cuda_steps_allocate_no_scratch_after_the_first():
    module = AttentionContext(256, device="cuda")
    x = torch.randn(1024, 256, device="cuda", requires_grad=True)

    def step():
        y = module(x)
        module.update(x, y)
        y.backward(torch.ones_like(y))

    step()
    step()
    allocations = workspace.default.allocations
    step()
    assert workspace.default.allocations == allocations
