"""What only a GPU can show: products written in a wider dtype, several streams of allocation, clipping."""

import copy

import pytest
import torch
from torch import Tensor, nn

from leangrad.ops.linear import writes_wider
from leangrad.packed import pack_gradients
from tests.support import same_bits

pytestmark = pytest.mark.gpu


def network(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 64)).to("cuda", dtype)


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(128, 256, device="cuda", generator=generator).to(next(model.parameters()).dtype)
    y = model(x)
    y.backward(torch.randn(y.shape, device="cuda", generator=generator).to(y.dtype))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_backward_is_bitwise_plain(dtype: torch.dtype) -> None:
    plain = network(dtype)
    mine = copy.deepcopy(plain)
    packed = pack_gradients(mine)
    for model in (plain, mine):
        backward(model, 0)
    for a, b in zip(gradients(mine), gradients(plain), strict=True):
        assert same_bits(a, b)
    assert packed.report()["0.weight"].how == "written"


def test_wide_products_are_nearer_to_the_truth_than_bfloat16_sums() -> None:
    assert writes_wider(torch.device("cuda", 0), torch.bfloat16, torch.float32)
    plain = network(torch.bfloat16)
    mine, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    pack_gradients(mine, torch.float32)
    for seed in range(4):
        for model in (plain, mine, exact):
            backward(model, seed)
    for a, b, truth in zip(gradients(mine), gradients(plain), gradients(exact), strict=True):
        assert (a.double() - truth).norm() <= (b.double() - truth).norm()


def test_accumulation_allocates_no_temporary_of_a_weights_size() -> None:
    for dtype in (None, torch.float32):
        model = nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
        pack_gradients(model, dtype)
        x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            model(x).sum().backward()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        assert torch.cuda.max_memory_allocated() - before < model.weight.numel()


def test_clip_is_torchs_own() -> None:
    plain = network(torch.float32)
    mine = copy.deepcopy(plain)
    packed = pack_gradients(mine)
    for model in (plain, mine):
        backward(model, 0)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(packed.clip_norm_(0.1), expected)
    for a, b in zip(gradients(mine), gradients(plain), strict=True):
        torch.testing.assert_close(a, b)
    assert packed.all_finite()


def test_parameters_on_several_devices() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).cuda())
    packed = pack_gradients(model)
    model[1](model[0](torch.randn(3, 8)).cuda()).square().sum().backward()
    assert [flat.device.type for flat in packed.flats()] == ["cpu", "cuda"]
    expected = torch.nn.utils.get_total_norm([p.grad.cpu() for p in model.parameters()])
    torch.testing.assert_close(packed.clip_norm_(0.1).cpu(), expected)
    torch.testing.assert_close(packed.norm().cpu(), torch.tensor(0.1), rtol=1e-4, atol=0)


def test_embedding_sums_are_the_same_on_every_run() -> None:
    table = nn.Embedding(100, 64, device="cuda")
    packed = pack_gradients(table)
    indices = torch.randint(5, (4096,), device="cuda")
    g = torch.randn(4096, 64, device="cuda")
    results = []
    for _ in range(3):
        table.zero_grad()
        table(indices).backward(g)
        results.append(table.weight.grad.clone())
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
    truth = torch.zeros(100, 64, dtype=torch.float64, device="cuda").index_add_(0, indices, g.double())
    torch.testing.assert_close(results[0].double(), truth, rtol=1e-4, atol=1e-3)
    assert packed.report()["weight"].how == "written"


def test_layers_on_side_streams() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    plain = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(2)).cuda()
    mine = copy.deepcopy(plain)
    pack_gradients(mine)
    x = torch.randn(512, 2048, device="cuda")

    def step(model: nn.ModuleList) -> None:
        outputs = []
        for layer, stream in zip(model, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs.append(layer(layer(x)))
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        (outputs[0] + outputs[1]).square().mean().backward()

    for _ in range(20):
        for model in (plain, mine):
            model.zero_grad()
            step(model)
            step(model)
        for a, b in zip(gradients(mine), gradients(plain), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
