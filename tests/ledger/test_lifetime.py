"""Regions end on every way out, graphs die with their last reference, and threads do not disturb each other."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from leangrad.lean import lean, ledger_of, saving
from tests.support import same_bits
from tests.support.ledger_programs import DEPTHS, assert_same, backward, leaf


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Sigmoid())


def grads(module):
    return [p.grad for p in module.parameters()]


def step(net, seed=0):
    torch.manual_seed(seed)
    for p in net.parameters():
        p.grad = None
    x = leaf(4, 8, seed=seed)
    backward(net(x))
    return [x.grad, *grads(net)]


def nothing_is_left() -> bool:
    """No hook sees a saved tensor, no mode sees a call, no hook is on every module."""
    seen = []

    class Probe(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(type(self).__name__)
            return func(*args, **(kwargs or {}))

    w = leaf(8, 8)
    z = (w @ w).sin()
    plain = z.grad_fn._raw_saved_self.data
    modes = torch.overrides._get_current_function_mode_stack()
    hooks = torch.nn.modules.module
    return (
        isinstance(plain, torch.Tensor)
        and not modes
        and not hooks._global_forward_hooks
        and not hooks._global_forward_pre_hooks
    )


# ------------------------------------------------------------------------------------------------------- exceptions


class Stop(BaseException):
    """Not an Exception, like KeyboardInterrupt."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Stop, GeneratorExit])
@pytest.mark.parametrize("when", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "hook", "nested"])
def test_an_exception_in_forward_closes_the_region(error, when, where):
    class Fails(nn.Module):
        count = -1

        def forward(self, x):
            self.count += 1
            if self.count == when:
                raise error
            return x * 2

    net, plain = model(), model()
    fails = Fails()
    if where == "nested":
        net[2] = nn.Sequential(nn.GELU(), lean(nn.Sequential(fails), min_bytes=0))
        plain[2] = nn.Sequential(nn.GELU(), Fails())
        plain[2][1].count = 1 << 30
    elif where == "forward":
        net.append(fails)
        plain.append(nn.Module())
        plain[-1].forward = lambda x: x * 2
    else:
        net[2].register_forward_hook(lambda m, args, out: fails(out))
        plain[2].register_forward_hook(lambda m, args, out: out * 2)
    lean(net, min_bytes=0)
    for k in range(4):
        if k == when:
            with pytest.raises(error):
                net(leaf(4, 8))
            assert nothing_is_left()
        else:
            assert_same(step(net, k), step(plain, k), k)
    assert nothing_is_left()


def test_an_error_inside_an_op_closes_the_region():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), saving(min_bytes=0):
        leaf(8, 8).exp() @ leaf(3, 3)
    assert nothing_is_left()


def test_an_error_in_backward_leaves_the_ledger_usable():
    net, plain = lean(model(), min_bytes=0), model()
    x = leaf(4, 8)
    y = net(x)
    h = x * 1
    h.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(net(h) + y)
    for k in range(3):
        assert_same(step(net, k), step(plain, k), k)


# ------------------------------------------------------------------------------------------------------------ leaks


@contextlib.contextmanager
def no_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def storage_of(tensor):
    """A weak reference to the memory, taken where no function override sees it: one that hands out memory is wary."""
    with torch._C.DisableTorchFunction():
        return weakref.ref(tensor.untyped_storage())


class Watch:
    """Weak references to every activation of a module, and to its memory."""

    def __init__(self, net):
        self.refs = []
        for m in net.modules():
            m.register_forward_hook(self._see)

    def _see(self, module, args, out):
        self.refs += [weakref.ref(out), storage_of(out)]

    def alive(self):
        return sum(r() is not None for r in self.refs)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("way", ["backward", "never", "exception"])
def test_a_ledger_dies_with_its_model(way, is_checkpointed):
    """The recording of its first step knows the region, and that the ledger and the checkpoint inside: no cycle."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model()

        def forward(self, x):
            y = checkpoint(self.inner, x, use_reentrant=False) if is_checkpointed else self.inner(x)
            return y * (1 / 0) if way == "exception" else y * y

    checkpoint(model(), leaf(4, 8), use_reentrant=False).sum().backward()  # torch's first one leaves a cycle
    with no_garbage_collector():
        net = lean(Net(), min_bytes=0)
        for _ in range(3):
            x = leaf(4, 8)
            if way == "exception":
                with pytest.raises(ZeroDivisionError):
                    net(x)
            else:
                y = net(x)
                if way == "backward":
                    backward(y)
                del y
        refs = [weakref.ref(one) for one in (x, net, net.inner[0].weight, ledger_of(net))]
        del x, net
        assert [r() for r in refs] == [None] * len(refs)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("way", ["backward", "never", "retained", "create_graph", "partial", "exception"])
@pytest.mark.sampled(3)
def test_memory_is_released_when_the_loss_is(way, depth):
    with no_garbage_collector():
        net = model()
        if way == "exception":
            net.append(nn.Identity())
            net[-1].register_forward_hook(lambda *_: 1 / 0)
        lean(net, residual_depth=depth, min_bytes=0)
        watch = Watch(net)
        for _ in range(4):
            x = leaf(4, 8)
            if way == "exception":
                with pytest.raises(ZeroDivisionError):
                    net(x)
                continue
            y = (net(x) + 1).sin()
            if way == "backward":
                backward(y)
            elif way == "retained":
                backward(y, retain_graph=True)
            elif way == "create_graph":
                (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
                del g
            elif way == "partial":
                backward(y, inputs=[net[4].weight], retain_graph=True)
            del y, x
            assert watch.alive() == 0
        assert watch.alive() == 0
        refs = [weakref.ref(net), *(weakref.ref(p) for p in net.parameters())]
        assert "never computed twice" in ledger_of(net).summary()
        del net, watch
        assert not any(r() is not None for r in refs)


def test_an_anchor_is_released_after_its_last_reader():
    """In the middle of backward what is done with is gone."""
    alive = []
    with no_garbage_collector():
        w, v = leaf(8, 8), leaf(8, 8, seed=1)
        with saving(residual_depth=2, min_bytes=0):
            h = (w * 2).exp()
            y = h @ v
            ref = storage_of(y)
            z = y.sin().cos()
        del y
        assert ref() is not None
        h.register_hook(lambda g: alive.append(ref() is not None))
        backward(z)
    assert alive == [False]


def test_a_rebuilt_tensor_is_not_held_after_backward_of_a_part():
    """What one reader rebuilt must not stay for another that never comes."""
    with no_garbage_collector():
        w = leaf(64, 64)
        with saving(residual_depth=2, min_bytes=0):
            t = w.exp() * 2
            a, b = t.sin(), t.cos()
        del t
        before = storages()
        backward(a, retain_graph=True)
        w.grad = None
        assert storages() <= before, "a rebuilt tensor is still there"
        del b


def storages():
    """How many tensors Python can see; the garbage collector tracks them all, even while it is off."""
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def test_operands_cost_no_more_than_what_they_rebuild():
    """Four temporaries that need no gradient are summed up: plain keeps the sum, not the four."""
    alive = {}
    for name, region in (("plain", contextlib.nullcontext()), ("lean", saving(residual_depth=2, min_bytes=0))):
        with no_garbage_collector():
            w = leaf(64, 64)
            parts = [torch.full((64, 64), float(k)) for k in range(4)]
            refs = [weakref.ref(p.untyped_storage()) for p in parts]
            with region:
                h = w.exp()
                s = h + parts[0] + parts[1] + parts[2] + parts[3]
                refs.append(storage_of(s))
                z = s.sin()
            del parts, s, h
            alive[name] = sum(r() is not None for r in refs)
            backward(z)
    assert alive["lean"] <= alive["plain"], alive


# ---------------------------------------------------------------------------------------------------------- threads


def in_threads(*works):
    """Run them at the same time; raise the first error of any."""
    errors, gate = [], threading.Barrier(len(works))

    def guarded(work):
        gate.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def quiet(net):
    net[3].p = 0.0  # two threads share one stream of random numbers: what each draws is not its own
    return net


@pytest.mark.parametrize("shared", [False, True])
def test_two_threads_train_at_the_same_time(shared):
    plain = [quiet(model(0)), quiet(model(0 if shared else 1))]
    first = lean(quiet(model(0)), min_bytes=0)
    nets = [first, first if shared else lean(quiet(model(1)), min_bytes=0)]
    mine = {}

    def work(n):
        def run():
            for k in range(20):
                x = leaf(2 + k % 3 + n, 8, seed=100 * n + k)
                mine[n, k] = torch.autograd.grad(nets[n](x).square().sum(), [x, *nets[n].parameters()])

        return run

    in_threads(work(0), work(1))
    for (n, k), found in mine.items():
        x = leaf(2 + k % 3 + n, 8, seed=100 * n + k)
        expected = torch.autograd.grad(plain[n](x).square().sum(), [x, *plain[n].parameters()])
        assert_same(list(found), list(expected), (n, k))


def test_backward_in_another_thread():
    net, plain = lean(model(), min_bytes=0), model()
    for k in range(4):
        results = []
        for m in (net, plain):
            torch.manual_seed(k)
            m.zero_grad()
            x = leaf(4, 8, seed=k)
            y = m(x)
            in_threads(lambda y=y: backward(y))
            results.append([x.grad, *grads(m)])
        assert_same(*results, k)


def test_two_threads_run_backward_of_one_graph():
    net, plain = lean(quiet(model()), min_bytes=0), quiet(model())
    x = leaf(4, 8)
    expected = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
    for _ in range(8):
        y, found = net(x).square().sum(), []

        def work(y=y, found=found):
            found.append(torch.autograd.grad(y, [x, *net.parameters()], retain_graph=True))

        in_threads(work, work, work)
        for g in found:
            assert_same(list(g), list(expected), "threads")


def test_dropout_in_threads_fits_its_own_mask():
    """A mask that is drawn again must be the mask of the forward, whoever else draws meanwhile."""
    wrong = []

    def work():
        for _ in range(40):
            x = torch.ones(64, 64, requires_grad=True)
            with saving(residual_depth=2, min_bytes=0):
                y = F.dropout(x * 1.0, 0.5)
                z = y.exp()
            (g,) = torch.autograd.grad(z.sum(), x)
            wrong.append(not same_bits(g != 0, y != 0))

    in_threads(work, work, work)
    assert not any(wrong), f"{sum(wrong)} of {len(wrong)}"


def test_backward_leaves_the_random_stream_alone():
    """Drawing a mask again must not show in what is drawn later."""
    draws = []
    for region in (contextlib.nullcontext(), saving(residual_depth=2, min_bytes=0)):
        torch.manual_seed(0)
        w = leaf(8, 8)
        with region:
            z = F.dropout(w.exp(), 0.5).sin()
            u = F.alpha_dropout(z * 2, 0.5, training=True).cos()
        torch.rand(3)
        backward(u)
        draws.append(torch.rand(5))
    assert same_bits(*draws)


def test_a_region_in_one_thread_is_none_in_another():
    seen = []

    def work():
        seen.append(nothing_is_left())

    with saving(min_bytes=0):
        in_threads(work)
    assert seen == [True]
