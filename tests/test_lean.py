"""The front door: what ``lean``, ``plain``, ``saving``, ``is_lean`` and ``ledger_of`` do to a model."""

import copy
import doctest
import importlib
import inspect
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leangrad
from leangrad.lean import is_lean, lean, ledger_of, plain, saving
from leangrad.ledger import MIN_BYTES, Ledger
from leangrad.ledger.learn.entries import Totals
from tests.support import same_bits
from tests.support.ledger_programs import assert_same, backward, leaf


class Net(nn.Module):
    """A model with a signature, a buffer and an attribute."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 8))
        self.norm = nn.BatchNorm1d(8)
        self.scale = 1.0

    def forward(self, x, *, scale: float = 1.0, mask=None):
        """Forward of the net."""
        y = self.norm(self.body(x) + x) * scale * self.scale
        return y if mask is None else y.masked_fill(mask, 0)


def step(net, seed=0, **kwargs):
    torch.manual_seed(seed)
    for p in net.parameters():
        p.grad = None
    x = leaf(4, 8, seed=seed)
    backward(net(x, **kwargs))
    return [x.grad, *(p.grad for p in net.parameters()), *(b.clone() for b in net.buffers())]


def assert_trains_like(net, other, steps=3, *, is_plain=False):
    """The same bits as ``other`` in every step; something in ``net`` was rebuilt, unless it runs plain as it is."""
    for k in range(steps):
        assert_same(step(net, k), step(other, k), k)
    assert (rebuilt_bytes(net) == 0) == is_plain


def rebuilt_bytes(net):
    return sum(ledger_of(m).totals().rebuilt_bytes for m in net.modules() if is_lean(m))


# --------------------------------------------------------------------------------------------------- the same object


def test_lean_returns_the_same_object():
    net = Net()
    kind, names, state = type(net), [n for n, _ in net.named_modules()], net.state_dict()
    parameters = list(net.parameters())
    assert lean(net) is net
    assert type(net) is kind
    assert [n for n, _ in net.named_modules()] == names
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert net.state_dict().keys() == state.keys()
    assert repr(net) == repr(Net())
    assert plain(net) is net
    assert net.__dict__.keys() == Net().__dict__.keys()
    assert not net._forward_hooks
    assert not net._forward_pre_hooks


def test_a_lean_model_trains_like_the_plain_one():
    assert_trains_like(lean(Net(), min_bytes=0), Net())


def test_keyword_arguments_and_masks_pass_through():
    net, other, mask = lean(Net(), min_bytes=0), Net(), torch.eye(4, 8).bool()
    for k in range(3):
        assert_same(step(net, k, scale=k + 0.5, mask=mask), step(other, k, scale=k + 0.5, mask=mask), k)


def test_the_signature_and_the_docstring_are_those_of_forward():
    net = lean(Net())
    assert inspect.signature(net.forward) == inspect.signature(Net().forward)
    assert net.forward.__name__ == "forward"
    assert net.forward.__doc__ == "Forward of the net."


def test_is_lean_is_about_this_very_module():
    net = Net()
    assert not is_lean(net)
    lean(net.body)
    assert is_lean(net.body)
    assert not is_lean(net)
    assert not is_lean(plain(net.body))


def test_plain_undoes_and_is_harmless_on_a_plain_model():
    net = plain(plain(lean(Net(), min_bytes=0)))
    assert not is_lean(net)
    assert_trains_like(net, Net(), is_plain=True)
    x = leaf(4, 8)
    assert isinstance((net.body(x).sin()).grad_fn._raw_saved_self.data, torch.Tensor)


def test_lean_twice_takes_the_new_settings():
    net = lean(lean(Net(), min_bytes=0), min_bytes=7, residual_depth=3)
    assert ledger_of(net).min_bytes == 7
    assert ledger_of(net).residual_depth == 3
    assert not is_lean(plain(net))
    assert_trains_like(lean(lean(Net(), min_bytes=0), min_bytes=0), Net())


def test_lean_inside_lean():
    net = Net()
    lean(net.body, min_bytes=0)
    lean(net.body[4], min_bytes=0)
    lean(net, min_bytes=0)
    other = Net()
    assert_trains_like(net, other)
    assert_trains_like(plain(net), other)
    plain(net.body)
    assert_trains_like(net, other, is_plain=True)  # only a Linear is left


def test_saving_around_a_lean_model():
    net, other, ledger = lean(Net(), min_bytes=0), Net(), saving(min_bytes=0)
    for k in range(3):
        with ledger, saving(min_bytes=0):
            mine = step(net, k)
        assert_same(mine, step(other, k), k)
    assert ledger.totals().rebuilt_bytes > 0
    assert rebuilt_bytes(net) == 0  # the outer region is the one that is open


def test_a_forward_that_was_set_on_the_instance_is_kept():
    net, other = Net(), Net()
    for n in (net, other):
        n.forward = lambda x, n=n: n.body(x).sin()
    before = net.forward
    lean(net, min_bytes=0)
    assert_trains_like(net, other)
    assert plain(net).forward is before


# -------------------------------------------------------------------------------------------------------------- copies


def test_a_deep_copy_is_lean_and_trains_on_its_own():
    net = lean(Net(), min_bytes=0, residual_depth=1)
    step(net)
    twin = copy.deepcopy(net)
    assert is_lean(twin)
    assert ledger_of(twin) is not ledger_of(net)
    assert (ledger_of(twin).min_bytes, ledger_of(twin).residual_depth) == (0, 1)
    twin.scale = 3.0
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0.5)
    other = copy.deepcopy(plain(copy.deepcopy(twin)))
    assert_trains_like(twin, other)
    fresh = Net()
    fresh.load_state_dict(net.state_dict())
    assert_trains_like(net, fresh)


def test_a_deep_copy_of_a_model_with_a_way_of_its_own():
    class Own(Net):
        def __deepcopy__(self, memo):
            twin = Own.__new__(Own)
            twin.__dict__.update({k: copy.deepcopy(v) for k, v in self.__dict__.items()})
            return twin

    twin = copy.deepcopy(lean(Own(), min_bytes=0))
    twin.scale = 3.0
    other = Net()
    other.scale = 3.0
    assert_trains_like(twin, other)


@pytest.mark.parametrize("way", [copy.copy, lambda m: m._replicate_for_data_parallel()], ids=["copy", "replica"])
def test_a_shallow_copy_runs_itself(way):
    net = lean(Net().eval(), min_bytes=0)
    twin = way(net)
    twin.body, twin.norm, twin.scale = net.body, net.norm, 3.0
    x = torch.ones(2, 8)
    assert same_bits(twin(x), net(x) * 3.0)


def test_a_model_inside_another_is_copied_with_it():
    outer = nn.Sequential(lean(Net(), min_bytes=0), nn.Sigmoid())
    twin = copy.deepcopy(outer)
    assert is_lean(twin[0])
    assert_trains_like(twin, nn.Sequential(Net(), nn.Sigmoid()))


@pytest.mark.parametrize("way", ["pickle", "torch"])
def test_a_model_survives_a_file(way):
    net = lean(Net(), min_bytes=3, residual_depth=2)
    step(net)
    if way == "pickle":
        twin = pickle.loads(pickle.dumps(net))
    else:
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert is_lean(twin)
    assert (ledger_of(twin).min_bytes, ledger_of(twin).residual_depth) == (3, 2)
    twin.scale = net.scale = 2.0
    assert_trains_like(twin, plain(net))


def test_a_state_dict_is_the_plain_one():
    net, other = lean(Net(1)), Net(2)
    other.load_state_dict(net.state_dict())
    net.load_state_dict(other.state_dict())
    assert net.state_dict().keys() == Net().state_dict().keys()


def test_the_model_dies_with_its_last_reference():
    import weakref

    net = lean(Net())
    ref = weakref.ref(net)
    del net
    assert ref() is None


# ---------------------------------------------------------------------------------------------------- where it is plain


def runs_plain(net, x):
    """Whether what the region's ops save is the tensor itself."""
    found = []
    handle = net.body[4].register_forward_hook(lambda m, args, out: found.append(out))
    net(x)
    handle.remove()
    node = found[0].grad_fn
    return node is None or isinstance(node._raw_saved_mat1.data, torch.Tensor)


def test_under_no_grad_and_inference_mode_it_runs_plain():
    net, other = lean(Net().eval(), min_bytes=0), Net().eval()
    x = torch.ones(2, 8)
    assert not runs_plain(net, x)
    with torch.no_grad():
        assert runs_plain(net, x)
        assert same_bits(net(x), other(x))
    with torch.inference_mode():
        y = net(x)
    assert y.is_inference()
    assert same_bits(y, other(x))


def test_eval_mode_trains_like_plain():
    assert_trains_like(lean(Net().eval(), min_bytes=0), Net().eval())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own rules for forward mode
def test_functional_calls_and_transforms():
    net, other = lean(Net().eval(), min_bytes=0), Net().eval()
    x = leaf(4, 8).detach()
    parameters = dict(other.named_parameters())

    def loss(m):
        return lambda p, x: torch.func.functional_call(m, p, (x,)).square().sum()

    for make in (
        lambda m: torch.func.grad(loss(m))(parameters, x),
        lambda m: torch.func.vmap(torch.func.grad(loss(m)), (None, 0))(parameters, x.unsqueeze(1)),
        lambda m: {"y": torch.func.vmap(m)(x.unsqueeze(1))},
        lambda m: {"j": torch.func.jacrev(m)(x[:1])},
        lambda m: {"j": torch.func.jacfwd(m)(x[:1])},
        lambda m: {"h": torch.func.hessian(lambda t: m(t).square().sum())(x[:1])},
        lambda m: {"v": torch.func.jvp(m, (x,), (torch.ones_like(x),))[1]},
        lambda m: {"j": torch.autograd.functional.jacobian(m, x[:1], vectorize=True)},
        lambda m: {"h": torch.autograd.functional.hvp(lambda t: m(t).square().sum(), x, torch.ones_like(x))[1]},
    ):
        mine, expected = make(net), make(other)
        for name in expected:
            assert same_bits(mine[name], expected[name]), name
    doubled = {n: (p.detach() * 2).requires_grad_() for n, p in parameters.items()}
    mine = torch.autograd.grad(loss(net)(doubled, x), list(doubled.values()))
    assert_same(list(mine), list(torch.autograd.grad(loss(other)(doubled, x), list(doubled.values()))), "call")


@pytest.mark.filterwarnings("ignore:.*compiles a lean model as a plain one")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["compile(lean)", "lean(compile)", "lean around a compiled part"])
def test_under_compile(what, backend):
    torch._dynamo.reset()
    net, other = Net(), Net()
    for n in (net, other):
        n.body[3] = nn.Identity()  # the compiler draws its random numbers in another order
    if what == "compile(lean)":
        net = torch.compile(lean(net, min_bytes=0), backend=backend)
    elif what == "lean(compile)":
        net = lean(torch.compile(net, backend=backend), min_bytes=0)
    else:
        net.body = torch.compile(net.body, backend=backend)
        lean(net, min_bytes=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        # What AOT compiles is one node to autograd, whose saved tensors have no recipes.
        assert_trains_like(net, other, is_plain=what == "compile(lean)" or backend == "aot_eager")


@pytest.mark.slow
def test_a_compiled_part_is_compiled_once():
    """Whether a step is recorded or follows what was recorded is nothing to the compiler."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    net = nn.Sequential(nn.Linear(8, 8), torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend=backend))
    lean(net, min_bytes=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, which looks at the gradient of what is no leaf
        for _ in range(4):
            net(torch.ones(2, 8)).square().mean().backward()
    assert ledger_of(net).trace is not None
    assert len(graphs) == 1


def test_a_model_can_be_traced_scripted_and_exported():
    x = torch.ones(2, 8)
    net, other = lean(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).eval(), min_bytes=0), None
    other = copy.deepcopy(plain(copy.deepcopy(net)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert same_bits(torch.jit.trace(net, (x,))(x), other(x))
    assert same_bits(torch.fx.symbolic_trace(net)(x), other(x))
    assert same_bits(torch.export.export(net, (x,)).module()(x), other(x))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_a_part_can_be_exported_inside_a_region(strict):
    x, part = torch.randn(4, 8), nn.Sequential(nn.BatchNorm1d(8))
    with warnings.catch_warnings(), saving(min_bytes=0):
        warnings.simplefilter("ignore", DeprecationWarning)
        exported = torch.export.export(copy.deepcopy(part), (x,), strict=strict)
    assert same_bits(exported.module()(x), part(x))


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("what", [None, 3, F.relu, nn.Linear, "model", [nn.Linear(1, 1)]])
@pytest.mark.parametrize("door", [lean, plain])
def test_what_is_no_module_is_refused(door, what):
    with pytest.raises(TypeError, match=r"expects an nn\.Module, got"):
        door(what)


@pytest.mark.parametrize("bad", [-1, 1.5, True, "all", None])
def test_a_bad_depth_is_refused_and_leaves_the_model_alone(bad):
    net = lean(Net(), min_bytes=5)
    with pytest.raises(ValueError, match="residual_depth"):
        lean(net, residual_depth=bad)
    assert is_lean(net)
    assert ledger_of(net).min_bytes == 5
    with pytest.raises(ValueError, match="residual_depth"):
        saving(residual_depth=bad)


@pytest.mark.parametrize("bad", [-1, 1.5, True, "16k", None])
def test_a_bad_size_is_refused(bad):
    with pytest.raises(ValueError, match="min_bytes"):
        lean(Net(), min_bytes=bad)


def test_the_ledger_of_a_plain_model_is_refused():
    with pytest.raises(ValueError, match="is not lean"):
        ledger_of(Net())


@pytest.mark.parametrize("function", [lean, plain, is_lean, ledger_of])
def test_each_door_names_what_is_no_module(function):
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) expects an nn.Module, got NoneType"):
        function(None)


@pytest.mark.parametrize("inside", [False, True])
def test_jit_script_says_what_to_do(inside):
    part = lean(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nn.Sequential(part, nn.Linear(4, 2)) if inside else part
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, of torch.jit
        with pytest.raises(
            AttributeError, match=r"torch.jit.script cannot compile a lean model.*leangrad.plain\(model\)"
        ):
            torch.jit.script(model)
        plain(part)
        x = torch.randn(2, 4)
        assert same_bits(torch.jit.script(model)(x), model(x))


# --------------------------------------------------------------------------------------------------------- the ledger


def test_saving_hands_out_its_ledger():
    with saving() as ledger:
        pass
    assert isinstance(ledger, Ledger)
    assert ledger.min_bytes == MIN_BYTES
    assert ledger.residual_depth == "auto"


def test_the_summary_names_module_op_and_reason():
    net = lean(Net(), min_bytes=0)
    assert "no step yet" in ledger_of(net).summary()
    step(net)
    text = ledger_of(net).summary()
    assert "body.1" in text or "body.2" in text
    # Of 4 x 16 the outputs of GELU and dropout and the noise are rebuilt; the first product and the sum are kept.
    assert ledger_of(net).totals() == Totals(kept_bytes=(64 + 32) * 4, rebuilt_bytes=3 * 64 * 4, shared_bytes=0)
    assert "never computed twice" in text


def test_what_is_rebuilt_is_not_kept():
    """A chain of pointwise ops over a product keeps the product alone: one map of 64 x 64 floats."""
    kept = []
    for region in (saving(min_bytes=1 << 40), saving(min_bytes=0)):
        w = leaf(64, 64)
        with region:
            y = ((w @ w).sigmoid() * 2 + 1).sin().exp()
        kept.append(unique_bytes(y))
    assert kept[1] == 64 * 64 * 4
    assert kept[0] > 2 * kept[1]


def unique_bytes(y):
    """The bytes of all values that the graph of ``y`` keeps, each memory once, leaves not counted."""
    memories, nodes = {}, [y.grad_fn]
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                values = [getattr(node, name).data]
                while values:
                    v = values.pop()
                    tensor = getattr(v, "tensor", None)
                    if tensor is not None and not tensor.requires_grad:
                        memories[tensor.untyped_storage().data_ptr()] = tensor.nbytes
                    values += [a for a in getattr(v, "args", ()) if hasattr(a, "tensor")] if tensor is None else []
        nodes += [n for n, _ in node.next_functions if n is not None]
    return sum(memories.values())


def test_the_examples_run():
    module = importlib.import_module("leangrad.lean")
    found = doctest.testmod(module)
    assert found.attempted >= 8
    assert found.failed == 0


def test_the_front_door_is_public():
    for name in ("is_lean", "lean", "ledger_of", "plain", "saving"):
        assert getattr(leangrad, name) is globals()[name]
        assert name in leangrad.__all__
