"""`cached_norm`: never older than its parameter, and not computed again while nothing has changed."""

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import nn

from leangrad import norm_cache
from leangrad.norm_cache import cached_norm, forget_norm
from tests.support import same_bits


@pytest.fixture
def computed(monkeypatch):
    """A list that grows by one with each norm that is computed."""
    calls = []
    compute = norm_cache._norm

    def count(parameter):
        calls.append(1)
        return compute(parameter)

    monkeypatch.setattr(norm_cache, "_norm", count)
    return calls


def truth(parameter):
    return parameter.detach().double().square().sum().sqrt().item()


def make(*shape, **kwargs):
    return nn.Parameter(torch.randn(*(shape or (3, 4)), **kwargs))


# Values


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_value_and_dtype(dtype):
    parameter = make(50, 7, dtype=dtype)
    norm = cached_norm(parameter)
    expected = parameter.detach().abs().double().square().sum().sqrt().item()
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert norm.shape == ()
    assert not norm.requires_grad


@pytest.mark.parametrize("shape", [(), (1,), (0,), (5,), (2, 3, 4)], ids=str)
def test_any_shape(shape):
    parameter = nn.Parameter(torch.randn(shape))
    assert cached_norm(parameter).item() == pytest.approx(truth(parameter), rel=1e-6)
    assert cached_norm(parameter) is cached_norm(parameter)


def test_computed_once(computed):
    parameter = make()
    assert len({id(cached_norm(parameter)) for _ in range(5)}) == 1
    assert len(computed) == 1


def test_a_forward_and_backward_change_nothing(computed):
    """Nor does a graph that holds a view of the parameter."""
    layer, x = nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True)
    cached_norm(layer.weight)
    y = layer(x)
    cached_norm(layer.weight)
    y.backward(torch.randn_like(y))
    cached_norm(layer.weight)
    assert layer.weight.grad is not None
    assert len(computed) == 1


# Changes


def through_optimizer(kind, **kwargs):
    def change(parameter):
        parameter.grad = torch.ones_like(parameter)
        kind([parameter], lr=0.1, **kwargs).step()

    return change


def write_shared_vector(parameter):
    """`vector_to_parameters` leaves the parameter on the vector's memory, with a version counter of its own."""
    vector = torch.randn(parameter.numel())
    torch.nn.utils.vector_to_parameters(vector, [parameter])
    cached_norm(parameter)
    vector.add_(5)
    parameter.vector = vector


def swap_data_to_reused_memory(parameter):
    """Memory of the same address, shape and version as the one that was cached, but of other numbers."""
    address = parameter.data_ptr()
    for _ in range(200):
        parameter.data = torch.zeros(1)
        other = torch.full((3, 4), 9.0)
        parameter.data = other
        if other.data_ptr() == address:
            return


def load(parameter):
    module = nn.Module()
    module.p = parameter
    module.load_state_dict({"p": torch.ones(3, 4)})


def convert(parameter):
    module = nn.Module()
    module.p = parameter
    module.to(torch.float64).to(torch.bfloat16).to(torch.float32)


CHANGES = {
    "in place": lambda p: p.add_(1),
    "through a view": lambda p: p[1].fill_(3),
    "through a detached view": lambda p: p.detach().view(-1)[2:].mul_(5),
    "copy": lambda p: p.copy_(torch.ones(3, 4)),
    "index": lambda p: p.index_fill_(0, torch.tensor([0]), 4),
    "out": lambda p: torch.mul(torch.ones(3, 4), 3, out=p),
    "foreach": lambda p: torch._foreach_mul_([p], 3.0),
    "init": lambda p: nn.init.normal_(p, std=4),
    "inference mode": lambda p: torch.inference_mode()(lambda: p.add_(1))(),
    "set": lambda p: p.set_(torch.ones(3, 4)),
    "new data": lambda p: setattr(p, "data", torch.ones(3, 4)),
    "new data, same address": swap_data_to_reused_memory,
    "other data, other shape": lambda p: setattr(p, "data", p.data.flatten()[:5]),
    "a shared vector": write_shared_vector,
    "load_state_dict": load,
    "to": convert,
    "clip": lambda p: nn.utils.clip_grads_with_norm_([p], 1.0, torch.tensor(1.0)) or p.clamp_(-0.1, 0.1),
    "sgd": through_optimizer(torch.optim.SGD),
    "sgd foreach": through_optimizer(torch.optim.SGD, foreach=True),
    "sgd fused": through_optimizer(torch.optim.SGD, fused=True),
    "adamw": through_optimizer(torch.optim.AdamW),
    "adamw foreach": through_optimizer(torch.optim.AdamW, foreach=True),
    "adamw fused": through_optimizer(torch.optim.AdamW, fused=True),
    "adagrad fused": through_optimizer(torch.optim.Adagrad, fused=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    parameter = make()
    for _ in range(3):
        before = cached_norm(parameter)
        old = before.item()
        with torch.no_grad():
            CHANGES[change](parameter)
        assert cached_norm(parameter).item() == pytest.approx(truth(parameter), rel=1e-5)
        assert before.item() == old  # what was handed out stays as it was


class Legacy(torch.optim.Optimizer):
    """As optimizers were written once: through `.data`, which moves no version."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.data)


def test_an_optimizer_that_writes_through_data_is_seen():
    parameter = make()
    optimizer = Legacy([parameter])
    parameter.grad = torch.ones_like(parameter)
    cached_norm(parameter)
    before = parameter._version
    optimizer.step()
    assert parameter._version == before
    assert cached_norm(parameter).item() == pytest.approx(truth(parameter))


def test_a_step_of_another_optimizer_changes_nothing(computed):
    ours, theirs = make(), make()
    theirs.grad = torch.ones_like(theirs)
    cached_norm(ours)
    torch.optim.AdamW([theirs], fused=True).step()
    cached_norm(ours)
    assert len(computed) == 1


def test_a_write_through_data_needs_to_be_told():
    """The hole that the note tells of; if torch closes it one day, the note may go."""
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    cached_norm(parameter)
    parameter.data.mul_(2)
    assert cached_norm(parameter).item() == 5
    forget_norm(parameter)
    assert cached_norm(parameter).item() == 10
    forget_norm(torch.ones(1))  # of one that was never asked for: nothing


def test_a_changed_result_is_not_handed_out_again():
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    cached_norm(parameter).mul_(100)
    assert cached_norm(parameter).item() == 5


@pytest.mark.parametrize("share", [lambda p: p.data, lambda p: p.detach().numpy(), lambda p: p.detach().view(-1)])
def test_memory_that_somebody_else_sees_is_not_cached(share, computed):
    """Whoever shares it from the beginning may write there with a version counter of its own, or with none."""
    parameter = make()
    other = share(parameter)
    for i in range(3):
        other[0] = i
        assert cached_norm(parameter).item() == pytest.approx(truth(parameter))
    assert len(computed) == 3
    del other
    assert cached_norm(parameter) is cached_norm(parameter)


# Where it is plain


def test_inference_tensors_and_inference_mode():
    with torch.inference_mode():
        tensor = torch.tensor([3.0, 4.0])
        assert cached_norm(tensor).item() == 5
        tensor.mul_(2)
        assert cached_norm(tensor).item() == 10
        parameter = make()
    parameter = make()
    with torch.inference_mode():
        norm = cached_norm(parameter)
    loss = (parameter * norm).sum()
    loss.backward()
    assert same_bits(parameter.grad, norm.expand(3, 4))


def test_transforms_subclasses_and_other_devices_run_plain(computed):
    x = torch.randn(5, 3)
    assert torch.func.vmap(cached_norm)(x).shape == (5,)

    class Marked(torch.Tensor):
        pass

    marked = torch.tensor([3.0, 4.0]).as_subclass(Marked)
    assert cached_norm(marked) is not cached_norm(marked)
    assert cached_norm(torch.ones(3, device="meta")).device.type == "meta"
    assert id(marked) not in norm_cache._entries


def test_a_compiled_function_computes_it():
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    cached_norm(parameter)
    compiled = torch.compile(lambda p: cached_norm(p) * 1, backend="eager", fullgraph=True)
    assert compiled(parameter).item() == 5
    parameter.data.mul_(2)  # unseen by the cache, but the compiled code does not ask it
    assert compiled(parameter).item() == 10


# Lifetime


def test_entries_end_with_their_parameters():
    gc.collect()
    before = len(norm_cache._entries)
    parameters = [make() for _ in range(20)]
    for parameter in parameters:
        cached_norm(parameter)
    assert len(norm_cache._entries) == before + 20
    del parameter, parameters
    gc.collect()
    assert len(norm_cache._entries) == before


def test_an_id_that_is_used_again_is_another_parameter():
    ids = set()
    for i in range(100):
        parameter = nn.Parameter(torch.full((4,), float(i)))
        ids.add(id(parameter))
        assert cached_norm(parameter).item() == 2 * i
        del parameter
    assert len(ids) < 100  # otherwise this test shows nothing


def test_a_parameter_that_only_a_graph_holds_keeps_its_norm(computed):
    parameter = make()
    cached_norm(parameter)
    y = parameter * 2
    del parameter
    gc.collect()
    parameter = y.grad_fn.next_functions[0][0].variable
    cached_norm(parameter)
    assert len(computed) == 1


def test_copies_and_pickles_know_nothing_of_it():
    layer = nn.Linear(4, 3)
    cached_norm(layer.weight)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            other.weight.mul_(2)
        assert cached_norm(other.weight).item() == pytest.approx(2 * cached_norm(layer.weight).item())


def test_swap_tensors_after_forgetting():
    parameter, other = make(), nn.Parameter(torch.tensor([3.0, 4.0]))
    cached_norm(parameter)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(parameter, other)
    forget_norm(parameter)
    torch.utils.swap_tensors(parameter, other)
    assert cached_norm(parameter).item() == 5


# Threads


def test_readers_never_see_a_norm_older_than_their_parameter():
    """One thread counts up in the parameter; a reader's norm lies between the count before and the count after."""
    parameter = nn.Parameter(torch.zeros(1))
    count, done, wrong = [0, 0], threading.Event(), []

    def write():
        for i in range(1, 3000):
            count[0] = i  # the most that may be seen
            with torch.no_grad():
                parameter.fill_(i)
            count[1] = i  # the least
        done.set()

    def read():
        while not done.is_set():
            least = count[1]
            norm = cached_norm(parameter).item()
            if not least <= norm <= count[0]:
                wrong.append((least, norm, count[0]))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in (*threads, writer := threading.Thread(target=write)):
        thread.start()
    for thread in (*threads, writer):
        thread.join()
    assert wrong == []
    assert cached_norm(parameter).item() == 2999


def test_a_fused_step_during_the_computation_is_seen(monkeypatch):
    """The entry is stored after the optimizer's hook has passed, and must not stay."""
    parameter = make()
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    parameter.grad = torch.ones_like(parameter)
    compute = norm_cache._norm

    def step_meanwhile(p):
        norm = compute(p)
        optimizer.step()
        return norm

    cached_norm(make())  # the hook is there
    with monkeypatch.context() as patch:
        patch.setattr(norm_cache, "_norm", step_meanwhile)
        cached_norm(parameter)
    assert cached_norm(parameter).item() == pytest.approx(truth(parameter))


def test_reading_takes_no_lock():
    parameter = make()
    norm = cached_norm(parameter)
    with norm_cache._hook_lock:
        assert cached_norm(parameter) is norm


def test_many_threads_and_parameters():
    parameters = [nn.Parameter(torch.full((64,), float(i))) for i in range(20)]
    wrong = []

    def work():
        for _ in range(50):
            for i, parameter in enumerate(parameters):
                if cached_norm(parameter).item() != 8 * i:
                    wrong.append(i)
                temporary = nn.Parameter(torch.full((4,), float(i)))
                if cached_norm(temporary).item() != 2 * i:
                    wrong.append(-i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_cuda_optimizers_are_seen(fused):
    parameter = nn.Parameter(torch.randn(64, 64, device="cuda"))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    for _ in range(3):
        assert cached_norm(parameter) is cached_norm(parameter)
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        assert cached_norm(parameter).item() == pytest.approx(truth(parameter.cpu()), rel=1e-5)


@pytest.mark.gpu
def test_cuda_streams_and_captured_graphs():
    parameter = nn.Parameter(torch.randn(64, device="cuda"))
    norm = cached_norm(parameter)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert cached_norm(parameter) is not norm
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cached_norm(parameter)
    with torch.no_grad():
        parameter.mul_(2)
    graph.replay()
    assert captured.item() == pytest.approx(2 * norm.item())
    assert cached_norm(parameter).item() == pytest.approx(2 * norm.item())
