"""What the graph says of real steps is true: which bytes are one value, what an op reads, what may run twice."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad import floor
from leangrad.floor.aten_op import SHAPE_ONLY, Op, stored_tensors
from leangrad.floor.recorded_step import Recorder
from tests.support import same_bits
from tests.zoo import SMALL, Case

floor_module = importlib.import_module("leangrad.floor")  # `leangrad.floor` is the function

PRODUCTS = """
    mm addmm addmm_ bmm baddbmm mv dot matmul linear mkldnn_linear _scaled_mm _grouped_mm _addmm_activation convolution
    convolution_overrideable mkldnn_convolution cudnn_convolution_transpose _slow_conv2d_forward conv_depthwise3d
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention _flash_attention_forward
    _scaled_dot_product_cudnn_attention lstm gru mkldnn_rnn_layer _cudnn_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell
"""

OTHERS = """
    mul addcmul add sum mean native_layer_norm native_batch_norm native_group_norm _fused_rms_norm _softmax gelu
    native_dropout embedding index gather sort topk cumsum cat upsample_bilinear2d upsample_linear1d nonzero addr
    upsample_trilinear3d max_pool2d_with_indices _convert_indices_from_csr_to_coo _to_copy remainder
"""


def test_which_ops_are_products() -> None:
    assert [name for name in PRODUCTS.split() if not is_product(name)] == []
    assert [name for name in OTHERS.split() if is_product(name)] == []


def is_product(name: str) -> bool:
    packet = getattr(torch.ops.aten, name)
    return Op(getattr(packet, packet.overloads()[0]), (), {}).is_product


@torch.library.custom_op("leangrad_tests::triple", mutates_args=())
def triple(x: Tensor) -> Tensor:
    return 3 * x


class Triple(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return triple(x)


def test_another_librarys_op_is_not_run_twice() -> None:
    triple.register_autograd(lambda ctx, gradient: 3 * gradient)
    result = floor(nn.Sequential(nn.Linear(4, 8), Triple(), nn.Linear(8, 1)), torch.randn(4, 4), torch.mean)
    assert [(kept.op, kept.bytes, kept.module) for kept in result.tensors] == [("triple", 4 * 8 * 4, "1")]


class CheckedRecorder(Recorder):
    """A value is bytes that never change: whatever is read as a value is equal to what was first read as it."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[int, Tensor] = {}
        self.checks = 0

    def read(self, tensor: Tensor) -> Any:
        value = super().read(tensor)
        if value is self._gradient or value.unwritten or not tensor.numel():
            return value
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:
                tensor = tensor.narrow(dim, 0, 1)
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        content = tensor.detach().permute(order).contiguous().view(-1).view(torch.uint8)
        if value.index in self.contents:
            self.checks += 1
            assert same_bits(content, self.contents[value.index]), value
        else:
            self.contents[value.index] = content.clone()
        return value


def eager_bytes(one: Case, model: nn.Module, batch: tuple[Any, ...]) -> int:
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        one.step(model, batch)
    owned = {leaf.data_ptr() for leaf in (*model.parameters(), *model.buffers(), *stored_tensors(batch))}
    return sum(tensor.untyped_storage().nbytes() for key, tensor in storages.items() if key not in owned)


class Zeros(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x).abs()
        return (h * 0.0).exp().mean() + (h * -0.0).exp().mean()


def test_calls_that_differ_in_the_sign_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor_module, "Recorder", CheckedRecorder)
    assert floor(Zeros(4, 8), torch.randn(2, 4)).bytes == 2 * 8 * 4


@pytest.mark.slow
@pytest.mark.parametrize("one", SMALL, ids=lambda one: one.name)
@pytest.mark.sampled(3)
def test_values_of_real_steps(one: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    recorders: list[CheckedRecorder] = []

    def make() -> CheckedRecorder:
        recorders.append(CheckedRecorder())
        return recorders[-1]

    monkeypatch.setattr(floor_module, "Recorder", make)
    model, batch = one.make(), one.batch()
    result = floor(model, batch, one.loss)
    assert recorders[0].checks > 20
    assert 0 < result.bytes < eager_bytes(one, model, batch)


def backward_calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """For each shape-only op: a call, whose second argument is `self`."""
    aten, x, y, z = torch.ops.aten, torch.randn(2, 3, 8), torch.randn(2, 3, 8, 8), torch.randn(2, 3, 4, 8, 8)
    rows, weight, pixels = torch.tensor([1, 0]), torch.tensor(2.0), torch.randint(3, (2, 8, 8))
    maps = {1: x, 2: y, 3: z}
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "nll_loss_backward": (aten.nll_loss_backward, (weight, y[:, :, 0, 0], rows, None, 1, -100, weight)),
        "nll_loss2d_backward": (aten.nll_loss2d_backward, (weight, y, pixels, None, 1, -100, weight)),
    }
    for n in (2, 3):
        calls |= {
            f"avg_pool{n}d_backward": (
                getattr(aten, f"avg_pool{n}d_backward"),
                (getattr(F, f"avg_pool{n}d")(maps[n], 2), maps[n], [2] * n, [2] * n, [0] * n, False, True, None),
            ),
            f"_adaptive_avg_pool{n}d_backward": (
                getattr(aten, f"_adaptive_avg_pool{n}d_backward"),
                (getattr(F, f"adaptive_avg_pool{n}d")(maps[n], 2), maps[n]),
            ),
        }
        pooled, indices = getattr(F, f"max_pool{n}d")(maps[n], 2, return_indices=True)
        window = ([2] * n, [2] * n, [0] * n, [1] * n, False)
        op = getattr(aten, f"max_pool{n}d_with_indices_backward")
        calls[f"max_pool{n}d_with_indices_backward"] = (op, (pooled, maps[n], *window, indices))
        pooled, indices = getattr(F, f"adaptive_max_pool{n}d")(maps[n], 2, return_indices=True)
        calls[f"adaptive_max_pool{n}d_backward"] = (
            getattr(aten, f"adaptive_max_pool{n}d_backward"),
            (pooled, maps[n], indices),
        )
    for n, map_ in maps.items():
        for kind, mode in (("reflection", "reflect"), ("replication", "replicate")):
            name = f"{kind}_pad{n}d_backward"
            calls[name] = (getattr(aten, name), (F.pad(map_, [1] * 2 * n, mode=mode), map_, [1] * 2 * n))
    return calls


def test_shape_only_ops_do_not_read_self() -> None:
    calls = backward_calls()
    assert calls.keys() == SHAPE_ONLY
    for name, (op, (gradient, shaped, *rest)) in calls.items():
        nowhere = torch.full_like(shaped, float("nan"))
        assert same_bits(op(gradient, shaped, *rest), op(gradient, nowhere, *rest)), name


def test_masked_out_arguments_are_not_read() -> None:
    x, weight, nowhere = torch.randn(2, 3, 8), torch.randn(5, 3, 1), torch.full((2, 3, 8), float("nan"))
    convolution = torch.ops.aten.convolution_backward.default
    shape = ([1], [0], [1], False, [0], 1)

    def call(x: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Any, ...]:
        return (torch.ones(2, 5, 8), x, weight, [5], *shape, mask)

    to_input, to_weight = [True, False, True], [False, True, True]
    assert Op(convolution, call(x, weight, to_input), {}).unread == {"input"}
    assert same_bits(convolution(*call(x, weight, to_input))[0], convolution(*call(nowhere, weight, to_input))[0])
    assert Op(convolution, call(x, weight, to_weight), {}).unread == {"weight"}
    void = torch.full_like(weight, float("nan"))
    assert same_bits(convolution(*call(x, weight, to_weight))[1], convolution(*call(x, void, to_weight))[1])

    norm = torch.ops.aten.native_batch_norm_backward.default
    mean, var, gone = torch.randn(3), torch.rand(3) + 1, torch.full((3,), float("nan"))
    fixed = (torch.ones(2, 3, 8), x, mean, mean, var, mean, var, False, 1e-5, to_input)
    blank = (torch.ones(2, 3, 8), nowhere, mean, mean, var, gone, gone, False, 1e-5, to_input)
    assert Op(norm, fixed, {}).unread == {"input", "save_mean", "save_invstd", "save_var"}
    assert same_bits(norm(*fixed)[0], norm(*blank)[0])
    live = (torch.ones(2, 3, 8), x, mean, mean, var, mean, var, True, 1e-5, [True] * 3)
    blank = (torch.ones(2, 3, 8), x, mean, gone, gone, mean, var, True, 1e-5, [True] * 3)
    assert Op(norm, live, {}).unread == {"running_mean", "running_var"}
    assert all(same_bits(one, other) for one, other in zip(norm(*live), norm(*blank), strict=True))
