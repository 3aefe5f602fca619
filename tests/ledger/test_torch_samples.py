"""torch's own samples of every op and module that has gradients: lean beside plain, bit for bit, three steps each.

Each stands between cheap producers and consumers (``support/sandwich.py``). Ops are dealt out to ``DEALS`` tests, so
that several processes can share them. The counts have lower bounds: a net that has become empty must not pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leangrad.ledger.observe.active_region import region_is_open
from tests.support.fuzz import examples
from tests.support.sandwich import Counts, compare
from tests.support.torch_samples import full_name, module_infos, module_samples_of, op_infos, samples_of

DEALS = 6
EVERY = 1 << 30
DTYPES = {  # how many samples of each op are tried, here and in `make fuzz`
    torch.float32: (1, EVERY),
    torch.bfloat16: (1, EVERY),
    torch.complex64: (1, EVERY),
}
# The least that must be compared, of all ops: torch 2.13 has 547 with gradients, of which 537 have samples in float32,
# 454 in bfloat16 and 324 in complex64; 128 of those in float32 also change their input in place.
LEAST_OPS = {torch.float32: 480, torch.bfloat16: 390, torch.complex64: 270, "in place": 105}
LEAST_MODULES = 90  # of 106

pytestmark = [pytest.mark.fuzz, pytest.mark.slow]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def _quiet_and_deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch's samples warn of much; on a GPU sums may be in any order unless they are asked not to be."""
    on_gpu = request.node.callspec.params.get("device") == "cuda" if hasattr(request.node, "callspec") else False
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(on_gpu or before[0], warn_only=on_gpu or before[1])
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def assert_sound(counts: Counts, least: float, *, few: float = 0.02) -> None:
    """Nothing differs, enough was compared, bytes were rebuilt and the last step was known nearly everywhere.

    few: the share of those that differ in plain itself; on a GPU some add by atomics.
    """
    print(
        f"{len(counts.names)} compared in {counts.samples} samples, {counts.tensors} tensors; rebuilt in "
        f"{len(counts.rebuilding)}, followed in {counts.followed} samples; differs in plain: {sorted(counts.unsteady)}"
    )
    assert not counts.failures, "\n".join(counts.failures)
    assert len(counts.names) >= least
    assert len(counts.rebuilding) >= 0.85 * len(counts.names)
    assert counts.followed >= 0.85 * counts.samples
    assert len(counts.unsteady) <= few * len(counts.names)


def dealt(deal: int) -> list[Any]:
    return op_infos()[deal::DEALS]


def called(op: Any, sample: Any) -> Callable[[Any], Any]:
    return lambda tree: sample.output_process_fn_grad(op(tree[0], *tree[1], **tree[2]))


def called_in_place(op: Any, sample: Any) -> Callable[[Any], Any]:
    return lambda tree: op.inplace_variant(tree[0], *tree[1], **tree[2])


def deals() -> Iterator[Any]:
    """Every op in float32; of the other dtypes `make test` has one deal each, not the same."""
    for n, dtype in enumerate(DTYPES):
        for deal in range(DEALS):
            is_extended = n > 0 and deal != n
            yield pytest.param(dtype, deal, marks=pytest.mark.extended if is_extended else ())


@DEVICES
@pytest.mark.parametrize(("dtype", "deal"), [*deals()], ids=str)
def test_ops(dtype: torch.dtype, deal: int, device: str) -> None:
    counts = Counts()
    for op in dealt(deal):
        for sample in samples_of(op, device, dtype, examples(*DTYPES[dtype])):
            compare(full_name(op), called(op, sample), (sample.input, sample.args, sample.kwargs), counts)
    assert_sound(counts, LEAST_OPS[dtype] / DEALS * 0.9, few=0.02 if device == "cpu" else 0.05)


@DEVICES
@pytest.mark.parametrize("deal", range(2))
def test_ops_in_place(deal: int, device: str) -> None:
    """On what a producer gave, which no one else reads."""
    counts = Counts()
    for op in op_infos()[deal::2]:
        if op.inplace_variant is None or not op.supports_inplace_autograd:
            continue
        for sample in samples_of(op, device, torch.float32, examples(1, EVERY)):
            if isinstance(sample.input, Tensor) and not sample.broadcasts_input:
                tree = sample.input, sample.args, sample.kwargs
                compare(full_name(op), called_in_place(op, sample), tree, counts)
    assert_sound(counts, LEAST_OPS["in place"] / 2 * 0.9)


class Called(nn.Module):
    """A module that is called with a tree of arguments."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tree: Any) -> Any:
        return self.module(*tree[0], **tree[1])


@DEVICES
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_modules(training: bool, device: str) -> None:
    counts = Counts()
    for info in module_infos():
        for sample in module_samples_of(info, device, torch.float32, training)[: examples(1, EVERY)]:
            if sample.forward_input is None:
                continue
            torch.manual_seed(0)
            try:
                module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            except Exception:  # what plain refuses is no sample
                continue
            module = Called(module.to(device).train(training))
            compare(info.name, module, (sample.forward_input.args, sample.forward_input.kwargs), counts)
    assert_sound(counts, LEAST_MODULES, few=0.02 if device == "cpu" else 0.05)


# ------------------------------------------------------------------------------------------------ that it can fail


def test_a_function_that_differs_under_a_ledger_is_found() -> None:
    counts = Counts()
    x = torch.randn(3, requires_grad=True)
    compare("differs", lambda tree: tree[0] * (2.0 + region_is_open()), (x,), counts)
    compare("raises", lambda tree: tree[0] * (2.0 if not region_is_open() else "two"), (x,), counts)
    assert [failure.split(":")[0] for failure in counts.failures] == ["differs, step 0, tensor 1", "raises, step 0"]
    assert not counts.names


def test_a_function_that_differs_in_plain_is_passed_over() -> None:
    """Only in what differs: the sign of its result is compared."""
    counts, calls = Counts(), iter(range(1, 1000))
    compare("noise", lambda tree: tree[0] * next(calls), (torch.randn(3, requires_grad=True),), counts)
    assert not counts.failures
    assert counts.unsteady == {"noise"}
    with pytest.raises(AssertionError):
        assert_sound(counts, 1)


def test_an_empty_net_does_not_pass() -> None:
    with pytest.raises(AssertionError):
        assert_sound(Counts(), 1)


def test_the_import_leaves_torch_as_it_was() -> None:
    call = torch._C.ScriptFunction.__call__
    op_infos()
    assert not torch.backends.flags_frozen()
    assert torch._C.ScriptFunction.__call__ is call
    assert "prof" not in getattr(call, "__name__", "")
    assert torch.get_default_dtype() is torch.float32
