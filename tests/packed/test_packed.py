"""How gradients arrive in the packed buffer: never twice, never stale, never silently None."""

import copy
import gc
import io
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leangrad import _torch
from leangrad.errors import ChangedError, LeangradError
from leangrad.packed import PackedGradients, pack_gradients
from tests.support import same_bits


class Tied(nn.Module):
    """Embedding and head share one weight; the head is a Linear, or a plain product with the table."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False) if head == "linear" else None
        if self.head is not None:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.table(x)).tanh()
        return self.head(h) if self.head is not None else h @ self.table.weight.t()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.GELU(), nn.Linear(10, 3))


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, PackedGradients]:
    plain = make().double()
    mine = copy.deepcopy(plain)
    return plain, mine, pack_gradients(mine)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    y = model(x)
    return (y * torch.randn(y.shape, generator=generator, dtype=torch.float64)).sum() + y.square().mean()


def token_loss(model: nn.Module, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.cross_entropy(model(torch.randint(11, (20,), generator=generator)), torch.arange(20) % 11)


def assert_same_gradients(mine: nn.Module, plain: nn.Module, exact: bool = False) -> None:
    for (name, a), (_, b) in zip(mine.named_parameters(), plain.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            tolerance = 0.0 if exact else 1e-12
            torch.testing.assert_close(
                a.grad, b.grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def assert_packed(model: nn.Module, packed: PackedGradients) -> None:
    """Every gradient lies in a range, in parameter order, aligned, and no two overlap."""
    end = {}
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        storage = parameter.grad.untyped_storage()
        start = parameter.grad.data_ptr()
        assert start % 64 == 0
        assert start >= end.get(storage.data_ptr(), 0)
        end[storage.data_ptr()] = start + parameter.grad.numel() * parameter.grad.itemsize
    assert {flat.untyped_storage().data_ptr() for flat in packed.flats()} == set(end)


def test_gradients_are_views_of_one_buffer_in_parameter_order() -> None:
    _, mine, packed = twins(mlp)
    loss_of(mine).backward()
    assert_packed(mine, packed)
    (flat,) = packed.flats()
    for parameter in mine.parameters():
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    flat.zero_()
    assert all(not p.grad.any() for p in mine.parameters())


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_micro_batches_sum(micro_batches: int, set_to_none: bool) -> None:
    plain, mine, packed = twins(mlp)
    for step in range(3):
        for model in (plain, mine):
            for index in range(micro_batches):
                loss_of(model, 10 * step + index).backward()
        assert_same_gradients(mine, plain, exact=micro_batches == 1 and set_to_none)
        assert_packed(mine, packed)
        for model in (plain, mine):
            model.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == set_to_none for p in mine.parameters())
    how = {row.name: row.how for row in packed.report().rows}
    assert how == {
        "0.weight": "written", "0.bias": "written", "1.weight": "added",
        "1.bias": "added", "3.weight": "written", "3.bias": "written",
    }  # fmt: skip


def test_the_first_micro_batch_overwrites_what_the_buffer_held() -> None:
    plain, mine, packed = twins(mlp)
    loss_of(mine).backward()
    packed.flats()[0].fill_(float("nan"))
    for name, parameter in mine.named_parameters():
        if name != "1.bias":  # which keeps the buffer standing
            parameter.grad = None
    mine[1].bias.grad.zero_()
    memory = mine[1].bias.grad.untyped_storage().data_ptr()
    for model in (plain, mine):
        loss_of(model, 1).backward()
    assert {p.grad.untyped_storage().data_ptr() for p in mine.parameters()} == {memory}
    assert_same_gradients(mine, plain, exact=True)
    assert torch.isfinite(packed.norm())


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda g: g,
    "detached": lambda g: g.detach(),
    "a view": lambda g: g.view(-1)[1:],
}


@pytest.mark.parametrize("way", KEPT)
def test_a_gradient_that_is_kept_beyond_zero_grad_stays_as_it_is(way: str) -> None:
    plain, mine, packed = twins(mlp)
    for model in (plain, mine):
        loss_of(model).backward()
    kept = [KEPT[way](p.grad) for p in mine.parameters()]
    expected = [k.clone() for k in kept]
    for model in (plain, mine):
        model.zero_grad()
    assert packed.norm() == 0
    for model in (plain, mine):
        loss_of(model, 1).backward()
    packed.scale_(1.0)
    assert_same_gradients(mine, plain, exact=True)
    assert_packed(mine, packed)
    assert packed.report()["0.weight"].counts["written"] == 2
    for a, b in zip(kept, expected, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("way", KEPT)
@pytest.mark.parametrize("name", ["0.weight", "1.weight"])  # one that is written, one that autograd adds
def test_a_gradient_that_is_kept_while_others_stand(name: str, way: str) -> None:
    plain, mine, packed = twins(mlp)
    for model in (plain, mine):
        loss_of(model).backward()
    parameter, kept = mine.get_parameter(name), KEPT[way](mine.get_parameter(name).grad)
    expected = kept.clone()
    for model in (plain, mine):
        model.get_parameter(name).grad = None
    with pytest.raises(LeangradError, match="has no gradient, but an earlier gradient is still held"):
        packed.norm()
    for model in (plain, mine):
        loss_of(model, 1).backward()
    assert_same_gradients(mine, plain)
    assert same_bits(kept, expected)
    assert packed.report()[name].how == "plain"
    assert "still held" in packed.report()[name].why
    with pytest.raises(LeangradError, match=r"stands outside the buffer.*still held"):
        packed.norm()
    del kept
    torch.testing.assert_close(packed.norm(), torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    assert parameter.grad.untyped_storage().data_ptr() == mine[3].bias.grad.untyped_storage().data_ptr()


def test_two_optimizers_that_zero_their_own_parameters() -> None:
    plain, mine, packed = twins(mlp)
    for model in (plain, mine):
        halves = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 3)]
        for step in range(4):
            loss_of(model, step).backward()
            halves[step % 2].step()
            halves[step % 2].zero_grad()
    assert_same_gradients(mine, plain)
    assert_packed(mine, packed)
    assert packed.report()["0.weight"].counts == {"written": 4}


@pytest.mark.parametrize("head", ["linear", "plain product"])
def test_tied_weights(head: str) -> None:
    plain, mine, packed = twins(lambda: Tied(head))
    for seed in range(2):
        for model in (plain, mine):
            token_loss(model, seed).backward()
        assert_same_gradients(mine, plain)
    assert packed.report()["table.weight"].how == "written"
    assert_packed(mine, packed)


def test_a_module_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).tanh())

    plain, mine, _ = twins(Twice)
    for model in (plain, mine):
        loss_of(model).backward()
        loss_of(model, 1).backward()
    assert_same_gradients(mine, plain)


def test_retain_graph() -> None:
    plain, mine, _ = twins(mlp)
    for model in (plain, mine):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
    assert_same_gradients(mine, plain)
    mine.zero_grad()
    loss.backward()  # after zero_grad the retained graph writes afresh
    plain.zero_grad()
    loss_of(plain).backward()
    assert_same_gradients(mine, plain, exact=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert_same_gradients(mine, plain, exact=True)


def test_autograd_grad_touches_nothing_and_is_right() -> None:
    plain, mine, packed = twins(mlp)
    loss_of(mine, 3).backward()
    before = [p.grad.clone() for p in mine.parameters()]
    expected = torch.autograd.grad(loss_of(plain), list(plain.parameters()))
    got = torch.autograd.grad(loss_of(mine), list(mine.parameters()))
    for a, b in zip(got, expected, strict=True):
        assert same_bits(a, b)
    some = torch.autograd.grad(loss_of(mine), [mine[3].weight])
    assert same_bits(some[0], expected[4])
    for parameter, old in zip(mine.parameters(), before, strict=True):
        assert same_bits(parameter.grad, old)
    assert_packed(mine, packed)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_create_graph_is_plain_and_reported() -> None:
    plain, mine, packed = twins(mlp)
    for model in (plain, mine):
        loss_of(model).backward(create_graph=True)
    assert_same_gradients(mine, plain, exact=True)
    assert packed.report()["0.weight"].how == "plain"
    assert "create_graph" in packed.report()["0.weight"].why
    with pytest.raises(LeangradError, match="stands outside the buffer"):
        packed.norm()
    for model in (plain, mine):  # a penalty on the gradient, differentiated again
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        model.zero_grad()
        penalty.backward()
    assert_same_gradients(mine, plain)
    for model in (plain, mine):
        model.zero_grad()
        loss_of(model).backward()
    assert_same_gradients(mine, plain, exact=True)
    assert_packed(mine, packed)


def test_second_order_through_autograd_grad() -> None:
    results = []
    plain, mine, _ = twins(mlp)
    for model in (plain, mine):
        (g,) = torch.autograd.grad(loss_of(model), [model[0].weight], create_graph=True)
        g.square().sum().backward()
        results.append(g)
    assert same_bits(*results)
    assert_same_gradients(mine, plain)


def test_partial_backward() -> None:
    plain, mine, packed = twins(mlp)
    for model in (plain, mine):
        loss_of(model).backward(inputs=[model[3].weight, model[1].bias])
    assert_same_gradients(mine, plain, exact=True)
    assert mine[0].weight.grad is None
    for model in (plain, mine):
        loss_of(model, 1).backward()
    assert_same_gradients(mine, plain)
    assert_packed(mine, packed)


def test_tensor_hooks_see_and_change_the_gradient() -> None:
    plain, mine, packed = twins(mlp)
    for model in (plain, mine):
        seen: list[Tensor] = []
        handle = model[0].weight.register_hook(lambda g, seen=seen: (seen.append(g.clone()), g * 2)[1])
        loss_of(model).backward()
        loss_of(model, 1).backward()
        assert len(seen) == 2
        handle.remove()
    assert_same_gradients(mine, plain)
    row = packed.report()["0.weight"]
    assert row.how == "added"
    assert "tensor hook" in row.why
    assert_packed(mine, packed)
    for model in (plain, mine):
        loss_of(model, 2).backward()
    assert packed.report()["0.weight"].how == "written"
    assert_same_gradients(mine, plain)


@pytest.mark.parametrize("order", ["hook first", "packed first"])
def test_optimizer_step_inside_backward(order: str) -> None:
    plain = mlp().double()
    mine = copy.deepcopy(plain)

    def hook_up(model: nn.Module) -> None:
        for parameter in model.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=0.1)

            def step(p: nn.Parameter, optimizer: torch.optim.Optimizer = optimizer) -> None:
                assert p.grad is not None
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)

    hook_up(plain)
    if order == "hook first":
        hook_up(mine)
    packed = pack_gradients(mine)
    if order == "packed first":
        hook_up(mine)
    for seed in range(3):
        for model in (plain, mine):
            loss_of(model, seed).backward()
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        assert same_bits(a, b)
        assert a.grad is None
    assert packed.report().standing_bytes == 0


def test_frozen_and_unused_parameters_keep_none() -> None:
    def make() -> nn.Module:
        model = mlp()
        model.add_module("unused", nn.Linear(3, 3))
        model.forward = None  # replaced below
        del model.__dict__["forward"]
        model[0].requires_grad_(False)
        return model

    plain, mine, packed = twins(make)
    for model in (plain, mine):
        loss_of(nn.Sequential(*list(model.children())[:4])).backward()
    assert_same_gradients(mine, plain, exact=True)
    assert mine[0].weight.grad is None
    assert mine.unused.weight.grad is None
    assert packed.report()["unused.weight"].how == "none"
    torch.testing.assert_close(
        packed.norm(), torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    )


def test_a_gradient_set_to_none_by_hand_is_not_counted() -> None:
    plain, mine, packed = twins(mlp)
    for model in (plain, mine):
        loss_of(model).backward()
        model[3].weight.grad = None
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(packed.norm(), expected)
    for model in (plain, mine):
        loss_of(model, 1).backward()
    assert_same_gradients(mine, plain)


def test_a_replaced_gradient_is_added_to_copied_in_and_reported() -> None:
    plain, mine, packed = twins(mlp)
    for model in (plain, mine):
        loss_of(model).backward()
        model[0].weight.grad = torch.full((10, 6), 7.0, dtype=torch.float64)
        model[1].weight.grad = model[1].weight.grad.detach()  # the same memory under another name
        own = model[0].weight.grad
        loss_of(model, 1).backward()
        assert own[0, 0] != 7.0  # autograd has added to the user's own tensor, as always
    assert_same_gradients(mine, plain)
    assert packed.report()["0.weight"].how == "copied"
    assert "replaced" in packed.report()["0.weight"].why
    assert_packed(mine, packed)
    mine[0].weight.grad = torch.ones(10, 6, dtype=torch.float64)
    plain[0].weight.grad = torch.ones(10, 6, dtype=torch.float64)
    torch.testing.assert_close(packed.norm(), torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    assert packed.report()["0.weight"].counts["copied"] == 2
    assert_packed(mine, packed)


def test_the_data_of_a_gradient_is_replaced() -> None:
    plain, mine, packed = twins(mlp)
    for model in (plain, mine):
        loss_of(model).backward()
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data * 3  # the same tensor, other memory
        loss_of(model, 1).backward()
    assert_same_gradients(mine, plain)
    assert_packed(mine, packed)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant: bool) -> None:
    plain, mine, packed = twins(mlp)
    for model in (plain, mine):
        for seed in range(2):
            x = torch.randn(
                5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True
            )
            y = checkpoint(model, x, use_reentrant=use_reentrant)
            y.backward(torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3))
    assert_same_gradients(mine, plain)
    assert packed.report()["0.weight"].how == "written"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_of_a_shared_layer_under_autocast(use_reentrant: bool) -> None:
    plain = nn.Linear(6, 6)
    mine = copy.deepcopy(plain)
    pack_gradients(mine)
    for model in (plain, mine):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(lambda t, m=model: m(m(t)), x, use_reentrant=use_reentrant)
        y.backward(torch.ones_like(y))
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad, rtol=2e-2, atol=2e-2)


def test_torch_compile_is_plain_inside_and_packed_outside() -> None:
    plain, mine, packed = twins(mlp)
    compiled = torch.compile(mine, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        loss_of(plain, seed).backward()
        loss_of(compiled, seed).backward()
    assert_same_gradients(mine, plain)
    assert_packed(mine, packed)
    assert packed.report()["0.weight"].how == "added"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_function_transforms_are_plain() -> None:
    plain, mine, _ = twins(mlp)
    x = torch.randn(4, 6, dtype=torch.float64)
    for transform in (
        lambda m: torch.func.jacrev(lambda t: m(t))(x[0]),
        lambda m: torch.func.vmap(lambda t: m(t))(x),
        lambda m: torch.func.jvp(lambda t: m(t), (x,), (x,))[1],
        lambda m: torch.func.functional_call(m, {n: p.detach() * 2 for n, p in m.named_parameters()}, (x,)),
        lambda m: torch.func.grad(lambda p: torch.func.functional_call(m, p, (x,)).square().sum())(
            {n: p.detach() for n, p in m.named_parameters()}
        )["0.weight"],
    ):
        assert same_bits(transform(mine), transform(plain))
    assert all(p.grad is None for p in mine.parameters())


def test_two_threads_lose_nothing() -> None:
    plain, mine, packed = twins(mlp)
    for seed in range(8):
        loss_of(plain, seed).backward()

    def work(seeds: range) -> None:
        for seed in seeds:
            loss_of(mine, seed).backward()

    for _ in range(20):  # one in fifteen rounds lost a gradient when a hook moved it while the other thread added to it
        mine.zero_grad()
        threads = [threading.Thread(target=work, args=(range(start, 8, 2),)) for start in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_same_gradients(mine, plain)
    # In the last round too: who comes second to a weight, in the middle of the other's write, adds.
    assert packed.report()["0.weight"].how in ("written", "added")
    torch.testing.assert_close(packed.norm(), torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    assert_packed(mine, packed)


def test_class_parameters_and_state_dict_stay() -> None:
    plain, mine, packed = twins(mlp)
    assert [type(m) for m in mine.modules()] == [type(m) for m in plain.modules()]
    assert list(mine.state_dict()) == list(plain.state_dict())
    packed.unpack()
    assert all("forward" not in m.__dict__ for m in mine.modules())
    assert all(not p._post_accumulate_grad_hooks for p in mine.parameters())


def test_copies_and_saved_models_are_plain() -> None:
    plain, mine, packed = twins(mlp)
    loss_of(mine).backward()
    average = copy.deepcopy(mine)
    buffer = io.BytesIO()
    torch.save(mine, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    before = [p.grad.clone() for p in mine.parameters()]
    loss_of(plain).backward()
    for other in (average, loaded):
        other.zero_grad()
        loss_of(other).backward()
        assert_same_gradients(other, plain, exact=True)
        assert "PackedProduct" not in repr(other[0](torch.ones(2, 6, dtype=torch.float64)).grad_fn)
    for parameter, old in zip(mine.parameters(), before, strict=True):
        assert same_bits(parameter.grad, old)
    assert_packed(mine, packed)


def test_parameters_that_change_after_packing() -> None:
    plain, mine, packed = twins(mlp)
    for model in (plain, mine):
        model.append(nn.Linear(3, 2, bias=False, dtype=torch.float64))
        nn.init.ones_(model[4].weight)
        loss_of(model).backward()
    assert_same_gradients(mine, plain, exact=True)
    with pytest.raises(ChangedError, match=r"4\.weight is a new trainable parameter.*repack"):
        packed.norm()
    packed.repack()
    torch.testing.assert_close(packed.norm(), torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    for model in (plain, mine):
        loss_of(model, 1).backward()
    assert_same_gradients(mine, plain)
    assert_packed(mine, packed)

    for model in (plain, mine):  # freezing needs nothing: the gradient stops, as it does in plain
        model.zero_grad()
        model[0].requires_grad_(False)
        loss_of(model, 2).backward()
    assert_same_gradients(mine, plain, exact=True)
    packed.norm()

    mine.float()
    with pytest.raises(ChangedError, match=r"packed as torch.float64 and is now torch.float32.*repack"):
        mine(torch.ones(2, 6)).sum().backward()
    mine.zero_grad()
    packed.repack()
    mine(torch.ones(2, 6)).sum().backward()
    assert_packed(mine, packed)

    mine[3] = nn.Linear(10, 3)
    with pytest.raises(ChangedError, match="repack"):
        packed.norm()


@pytest.mark.parametrize("has_registries", [True, False])
def test_changes_of_the_model_are_seen(has_registries: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_registries:
        monkeypatch.setattr(_torch, "registries", lambda module: None)

    def thaw(model: nn.Sequential) -> None:
        model[0].requires_grad_(True)

    def add_a_parameter(model: nn.Sequential) -> None:
        model[3].extra = nn.Parameter(torch.ones(2))

    def add_a_module(model: nn.Sequential) -> None:
        model[2].extra = nn.Linear(2, 2)

    def replace_a_parameter(model: nn.Sequential) -> None:
        model[3].bias = nn.Parameter(torch.ones(3))

    def remove_a_module(model: nn.Sequential) -> None:
        del model[3]

    for change in (thaw, add_a_parameter, add_a_module, replace_a_parameter, remove_a_module):
        model = mlp()
        model[0].requires_grad_(False)
        packed = pack_gradients(model)
        packed.norm()
        model[1].bias.requires_grad_(False)  # to freeze needs no repacking
        model[2].register_buffer("buffer", torch.ones(1))
        packed.norm()
        change(model)
        with pytest.raises(ChangedError, match="repack"):
            packed.norm()
        packed.repack()
        packed.norm()


def test_unpack_gives_plain_back() -> None:
    plain, mine, packed = twins(mlp)
    for model in (plain, mine):
        loss_of(model).backward()
    loss = loss_of(mine, 1)
    packed.unpack()
    loss.backward()  # a graph from before
    loss_of(plain, 1).backward()
    assert_same_gradients(mine, plain)
    again = pack_gradients(mine)
    for model in (plain, mine):
        loss_of(model, 2).backward()
    assert_same_gradients(mine, plain)
    assert_packed(mine, again)


def test_the_packed_object_may_be_dropped() -> None:
    plain, mine, packed = twins(mlp)
    del packed
    gc.collect()
    for model in (plain, mine):
        loss_of(model).backward()
    assert_same_gradients(mine, plain, exact=True)
    assert len({p.grad.untyped_storage().data_ptr() for p in mine.parameters()}) == 1


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"pack_gradients\(\) expects an nn.Module, .*, got NoneType; pass the model"):
        pack_gradients(None)
    with pytest.raises(TypeError, match=r"dtype must be a torch.dtype such as torch.float32, or None, got str"):
        pack_gradients(nn.Linear(2, 2), "float32")
    with pytest.raises(ValueError, match="no trainable parameter"):
        pack_gradients(nn.ReLU())
    with pytest.raises(ValueError, match="no trainable parameter"):
        pack_gradients(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="sparse=False"):
        pack_gradients(nn.Embedding(3, 2, sparse=True))
    with pytest.raises(ValueError, match="wider dtype"):
        pack_gradients(nn.Linear(2, 2), torch.bfloat16)
    with pytest.raises(ValueError, match="give float32"):
        pack_gradients(nn.Linear(2, 2).half(), torch.bfloat16)
    with pytest.raises(ValueError, match="no shape yet"):
        pack_gradients(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="range_bytes"):
        pack_gradients(nn.Linear(2, 2), range_bytes=0)
    model = nn.Linear(2, 2)
    pack_gradients(model)
    with pytest.raises(ValueError, match="packed already"):
        pack_gradients(nn.Sequential(model))


def test_sparse_gradient_of_a_plain_op_stays_plain_and_is_reported() -> None:
    table = nn.Embedding(5, 3)
    packed = pack_gradients(table)
    F.embedding(torch.tensor([1, 1, 3]), table.weight, sparse=True).square().sum().backward()
    assert table.weight.grad.is_sparse
    assert packed.report()["weight"].how == "plain"
    with pytest.raises(LeangradError, match="stands outside"):
        packed.norm()


def test_several_dtypes_have_a_range_each() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    packed = pack_gradients(model)
    model[1](model[0](torch.randn(3, 4)).double()).sum().backward()
    assert [flat.dtype for flat in packed.flats()] == [torch.float32, torch.float64]
    expected = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm()
    torch.testing.assert_close(packed.norm().double(), expected, rtol=1e-6, atol=0)
    assert packed.all_finite()


def test_the_report_reads_well() -> None:
    _, mine, packed = twins(mlp)
    loss_of(mine).backward()
    text = str(packed.report())
    assert text.splitlines()[0] == "6 parameters: 2 added, 4 written"
    assert "a LayerNorm has no packed form" in text
    with pytest.raises(KeyError, match="no trainable parameter is called"):
        packed.report()["nobody"]
