"""The Triton kernels of activated batch norm: under the interpreter everywhere, compiled where there is a GPU."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support import same_bits
from tests.support.interpreter import run_interpreted

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_under_the_interpreter() -> None:
    run_interpreted("abn_kernel_cases.py", "all kernels agree")


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    from tests.support import abn_kernel_cases

    abn_kernel_cases.check_all("cuda")


@pytest.mark.gpu
def test_streams_and_a_captured_graph_on_a_gpu() -> None:
    """Scratch is shared by what runs in order only: not between streams, and not with a graph that is replayed."""
    from leangrad.nn.abn import ABN

    maps = [torch.randn(32, 64, 28, 28, device="cuda").to(memory_format=torch.channels_last) for _ in range(2)]
    dz = torch.randn_like(maps[0])
    layer = ABN(64, activation="relu", track_running_stats=False).cuda()

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        z = layer(x)
        return z.detach(), *torch.autograd.grad(z, [x, layer.weight, layer.bias], dz)

    expected = [run(x) for x in maps]
    streams = [torch.cuda.Stream() for _ in maps]
    torch.cuda.synchronize()
    results: list[tuple[torch.Tensor, ...]] = []
    for _ in range(5):
        for x, stream in zip(maps, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(x))
    torch.cuda.synchronize()
    for i, found in enumerate(results):
        for a, b in zip(found, expected[i % 2], strict=True):
            assert same_bits(a, b)
    still = maps[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(still)
    for x, want in zip(maps, expected, strict=True):
        still.copy_(x)
        graph.replay()
        run(maps[0])
        torch.cuda.synchronize()
        for a, b in zip(captured, want, strict=True):
            assert same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("height", [4, 64])
def test_the_answer_is_waited_for_on_a_gpu(height: int) -> None:
    """The device is far behind, and the write that makes a channel unfit is queued there, also behind the counter."""
    from leangrad.nn.abn import InPlaceABN

    layers = [InPlaceABN(16).cuda() for _ in range(2)]
    x = torch.randn(64, 16, height, height, device="cuda", requires_grad=True)
    dz, large = torch.randn_like(x), torch.randn(4096, 4096, device="cuda")
    for weight in (1.0, 0.0, 0.5, 1e-30):
        for _ in range(20):
            large = large @ large * 1e-3
        for layer in layers:
            layer.weight.data[3] = weight
        ours = [torch.autograd.grad(layer(x * 1), [x, *layer.parameters()], dz) for layer in layers]
        exact = [torch.autograd.grad(layer(x), [x, *layer.parameters()], dz) for layer in layers]  # keeps its input
        for found, wanted in zip(ours, exact, strict=True):
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # all is synchronized by hand here
def test_threads_and_streams_ask_for_themselves_on_a_gpu() -> None:
    """Each thread has its own answers on each stream, and memory that a thread leaves behind serves the next one."""
    from leangrad.nn.abn import InPlaceABN

    layer = InPlaceABN(16).cuda()
    with torch.no_grad():
        layer.weight[3] = 0.0
    x = torch.randn(64, 16, 32, 32, device="cuda", requires_grad=True)
    dz = torch.randn_like(x)
    exact = torch.autograd.grad(layer(x), [x, *layer.parameters()], dz)
    torch.cuda.synchronize()

    def run(_: int) -> list[torch.Tensor]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = [torch.autograd.grad(layer(x * 1), [x, *layer.parameters()], dz) for _ in range(5)][-1]
        stream.synchronize()
        return list(found)

    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(run, range(4)):
                for a, b in zip(found, exact, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.gpu
def test_kept_bytes_are_one_map_per_layer_on_a_gpu() -> None:
    """Also in the first layer, which asks: it does not go on with a second map while it waits."""
    from leangrad.nn.abn import InPlaceABN

    channels, x = 32, torch.randn(4, 32, 32, 32, device="cuda")
    vectors_bytes, kept_bytes = 4 * 4 * channels, {}
    for depth in (1, 2, 5):
        pairs = [(torch.nn.Conv2d(32, 32, 1, bias=False), InPlaceABN(32)) for _ in range(depth)]
        model = torch.nn.Sequential(*(layer for pair in pairs for layer in pair)).cuda()
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            z = model(x)
            kept_bytes[depth] = torch.cuda.memory_allocated() - before
            z.backward(torch.randn_like(z))
            del z
            model.zero_grad()
    assert kept_bytes == {depth: depth * (x.nbytes + vectors_bytes) for depth in kept_bytes}


@pytest.mark.gpu
def test_maps_that_are_not_aligned_on_a_gpu() -> None:
    """A kernel that was compiled for aligned maps must not get others, and the other way round."""
    from leangrad.nn.abn import ABN

    x = torch.randn(64, 32, device="cuda").bfloat16()
    layer = ABN(32, activation="relu", track_running_stats=False).cuda()
    expected = layer(x)
    for offset in (1, 0, 3, 8):
        memory = torch.empty(x.numel() + offset, dtype=x.dtype, device="cuda")
        moved = memory[offset:].view_as(x).copy_(x)
        assert same_bits(layer(moved), expected)
    layer.weight = torch.nn.Parameter(torch.ones(33, device="cuda")[1:])
    assert same_bits(layer(x), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
def test_large_map_on_a_gpu(channels_last: bool) -> None:
    """More than 2³¹ elements: offsets need 64 bits."""
    from leangrad.nn.abn import InPlaceABN

    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.empty(9, 64, 2048, 2048, dtype=torch.bfloat16, device="cuda", memory_format=memory_format)
    x.copy_(torch.arange(9, device="cuda").view(-1, 1, 1, 1) - 4.0)
    z = InPlaceABN(64, activation="identity").cuda()(x)
    expected = (torch.arange(9, device="cuda") - 4.0) / 60**0.5 * 3
    torch.testing.assert_close(z[:, -1, -1, -1].float(), expected.float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(z[:, 0, 0, 0].float(), expected.float(), rtol=1e-2, atol=1e-2)
