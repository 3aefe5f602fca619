"""`pack_gradients`: the front door, and the passes over the whole buffer."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from leangrad.errors import ChangedError, LeangradError

from . import ranges
from .layout import Structure, check_packable, has_plain_weight, lay_out, reasons_for_adding
from .modules import teach, unteach
from .passes import are_finite, narrow, norms_of, scale, whole
from .reduction import Reduction
from .report import Report, Row
from .slots import SLOTS, Slot

#: Gradients are allocated in ranges of about this size: small enough that the one that is being filled does not
#: raise the peak, large enough that a pass over all of them is a few large kernels.
RANGE_BYTES = 32 * 1024 * 1024

#: At most this much of the wider gradients is cast in one call on a GPU; both forms of it stand for that long.
CAST_BYTES = 512 * 1024 * 1024


class PackedGradients:
    """The packed gradients of one model; `pack_gradients` makes it."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, range_bytes: int | None) -> None:
        self._model, self._dtype, self._range_bytes = model, dtype, range_bytes
        self._pack()

    # -- packing ------------------------------------------------------------------------------------------------

    def _pack(self) -> None:
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        check_packable(self._model, named, self._dtype)
        SLOTS.drop_dead()
        self._structure = Structure(self._model)
        self._modules = [module for module in self._model.modules() if has_plain_weight(module) and teach(module)]
        why_added = reasons_for_adding(self._model, self._modules)
        self._pairs: list[tuple[nn.Parameter, Slot]] = []
        self._outside: list[tuple[str, nn.Parameter]] = []
        self._hooks: list[RemovableHandle] = []
        for name, parameter in named:
            if type(parameter) is not nn.Parameter:
                self._outside.append((name, parameter))
                continue
            slot = Slot(name, parameter, why_added[parameter])
            self._pairs.append((parameter, slot))
        self.ranges = lay_out(self._pairs, self._dtype, self._range_bytes)
        for parameter, slot in self._pairs:
            SLOTS.add(parameter, slot)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(slot.arrived))
            if slot.range.dtype != parameter.dtype and ranges.HAS_GRAD_DTYPE:
                parameter.grad_dtype = None  # any: autograd adds in place to whatever dtype stands there

    def unpack(self) -> None:
        """Give the model its own forwards back. `.grad` stays as it is, except that it gets its parameter's dtype."""
        for handle in self._hooks:
            handle.remove()
        for module in self._modules:
            unteach(module)
        for parameter, slot in self._pairs:
            slot.is_active = False
            SLOTS.remove(parameter)
            grad = parameter.grad
            if grad is not None and grad.dtype != parameter.dtype:
                parameter.grad = None
                parameter.grad = grad.to(parameter.dtype)
            if ranges.HAS_GRAD_DTYPE:
                parameter.grad_dtype = parameter.dtype
        self._pairs, self._outside, self._hooks, self._modules, self.ranges = [], [], [], [], []

    def repack(self) -> None:
        """Pack again after parameters were added, replaced, unfrozen, or moved to another dtype or device."""
        self.unpack()
        self._pack()

    # -- passes over the buffer ---------------------------------------------------------------------------------

    def flats(self) -> list[Tensor]:
        """The ranges that hold a gradient, as vectors in parameter order; zero where a parameter has no gradient.

        Each is the memory of the gradients themselves: what is done to it is done to them.
        """
        self._check_parameters()
        flats = self._settled()
        for range_ in self.ranges:
            range_.forget_zeros()  # whoever has the vector may write anywhere in it
        return flats

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The 2-norm of all gradients together, in float32 or wider: `torch.nn.utils.get_total_norm(grads)`."""
        norm = self._norm(self._settled())
        self._check_parameters()
        return norm

    @torch.no_grad()
    def clip_norm_(self, max_norm: float, *, cast: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_(parameters, max_norm)`: returns the norm before clipping.

        The norm is float32 or wider, and so is the factor on a GPU with Triton; torch rounds both to the dtype of the
        gradients. `cast=True` leaves the gradients as `cast_()` would, in the pass that scales them.
        """
        norm = self._norm(self._settled())
        self._check_parameters()  # which a GPU does not wait for: it is busy with the norm
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self._scale(self._cast(factor) if cast else self._standing(), factor)
        return norm

    @torch.no_grad()
    def scale_(self, factor: Tensor | float) -> None:
        """Multiply every gradient by `factor`, a number or a tensor of one element."""
        self._check_parameters()
        self._scale(self._settled(), factor)

    @torch.no_grad()
    def all_finite(self) -> Tensor:
        """Whether no gradient holds an Inf or a NaN, as a tensor of one bool (on CUDA nothing waits for it)."""
        parts = are_finite(self._settled())
        self._check_parameters()
        for _, parameter in self._outside:
            if parameter.grad is not None:
                parts.append(torch.isfinite(whole(torch.linalg.vector_norm(parameter.grad, float("inf")))))
        if not parts:
            return torch.ones((), dtype=torch.bool)
        return torch.stack([part.to(parts[0].device) for part in parts]).all()

    @torch.no_grad()
    def cast_(self) -> None:
        """Round gradients that were accumulated in a wider dtype to their parameter's, as torch's optimizers need them.

        Range by range, on a GPU in eight or more parts, so that both forms of no more than that stand at a time. The
        next gradient to arrive after `zero_grad` is accumulated in the wider dtype again.
        """
        self._check_parameters()
        self._settled()
        self._cast(None)

    def _settled(self) -> list[Tensor]:
        """Every range that stands, with zeros wherever there is no gradient."""
        for parameter, slot in self._pairs:
            slot.settle(parameter)
        for range_ in self.ranges:
            range_.clear_pads()
        return self._standing()

    def _standing(self) -> list[Tensor]:
        return [flat for range_ in self.ranges if (flat := range_.flat()) is not None]

    def _norm(self, flats: list[Tensor]) -> Tensor:
        norms = norms_of(flats)
        outside = [p.grad for _, p in self._outside if p.grad is not None]
        if outside:
            norms.append(whole(torch.nn.utils.get_total_norm(outside)).view(1))
        if not norms:
            return torch.zeros(())
        together = norms[0] if len(norms) == 1 else torch.cat([norm.to(norms[0].device) for norm in norms])
        norm: Tensor = torch.linalg.vector_norm(together)
        return norm

    def _scale(self, flats: list[Tensor], factor: Tensor | float) -> None:
        scale(flats, factor)
        for range_ in self.ranges:
            range_.forget_zeros()  # the factor may be infinite or NaN
        for _, parameter in self._outside:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _cast(self, factor: Tensor | None) -> list[Tensor]:
        """Cast, times `factor`, what has a wider dtype than its parameter; return the vectors that have not."""
        owners = {slot: parameter for parameter, slot in self._pairs}
        standing = [range_ for range_ in self.ranges if range_.base() is not None]
        for group in cast_groups([range_ for range_ in standing if range_.dtype != range_.parameter_dtype]):
            flats = [flat for range_ in group if (flat := range_.flat()) is not None]
            for range_, narrowed in zip(group, narrow(flats, group[0].parameter_dtype, factor), strict=True):
                for slot in range_.slots:
                    parameter = owners[slot]
                    if parameter.grad is not None:
                        parameter.grad = None  # a stand-in of the wider dtype cannot be replaced in one assignment
                        parameter.grad = narrowed.as_strided(slot.shape, slot.stride, slot.offset)
        return [flat for range_ in standing if (flat := range_.flat()) is not None]

    # -- processes ----------------------------------------------------------------------------------------------

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Average all gradients over the processes of `group`, now. `reducing` overlaps the same with backward."""
        with self.reducing(group):
            pass

    @contextmanager
    def reducing(self, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Average the gradients over the processes of `group` while the backward inside is still running.

        Each range is sent when it is full. Earlier micro-batches run before, outside; one backward runs inside:

            for batch in batches[:-1]:
                model(batch).backward()
            with packed.reducing():
                model(batches[-1]).backward()
            optimizer.step()
        """
        self._check_parameters()
        if self._outside:
            raise LeangradError(
                f"{self._outside[0][0]} is a {type(self._outside[0][1]).__name__}: its wrapper reduces it"
            )
        reduction = Reduction(self._pairs, group)
        reduction.watch()
        try:
            yield
            with torch.no_grad():
                reduction.finish()
        finally:
            reduction.stop()

    # -- what happened ------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """How each parameter's gradient arrived: written, added, copied or plain, and why."""
        rows = [
            Row(slot.name, slot.numel * slot.range.dtype.itemsize, slot.how, slot.why, dict(slot.counts))
            for _, slot in self._pairs
        ]
        for name, parameter in self._outside:
            why = f"a {type(parameter).__name__} keeps its gradient where its wrapper wants it"
            rows.append(Row(name, parameter.numel() * parameter.dtype.itemsize, "plain", why, {}))
        standing = sum(range_.bytes for range_ in self.ranges if range_.base() is not None)
        return Report(tuple(rows), len(self.ranges), sum(range_.bytes for range_ in self.ranges), standing)

    def _check_parameters(self) -> None:
        if self._structure.is_unchanged():
            return
        known = {id(p) for p in itertools.chain((p for p, _ in self._pairs), (p for _, p in self._outside))}
        for name, parameter in self._model.named_parameters():
            if id(parameter) in known:
                known.discard(id(parameter))
            elif parameter.requires_grad:
                raise ChangedError(f"{name} is a new trainable parameter since packing; call repack()")
        if known:
            raise ChangedError(f"{len(known)} packed parameters are no longer part of the model; call repack()")


def cast_groups(wide: list[ranges.Range]) -> list[list[ranges.Range]]:
    """The ranges that are cast in one call: up to an eighth of all on a GPU, where a call costs as much as a range."""
    groups: list[list[ranges.Range]] = []
    limit = min(CAST_BYTES, sum(range_.bytes for range_ in wide) // 8)
    kind, room = None, 0
    for range_ in wide:
        its_kind = (range_.device, range_.dtype, range_.parameter_dtype)
        if its_kind != kind or range_.bytes > room:
            groups.append([])
            kind, room = its_kind, limit if range_.device.type == "cuda" else 0
        groups[-1].append(range_)
        room -= range_.bytes
    return groups


def pack_gradients(
    model: nn.Module, dtype: torch.dtype | None = None, *, range_bytes: int | None = RANGE_BYTES
) -> PackedGradients:
    """Make every trainable parameter's `.grad` a view of a flat buffer that the layers write into themselves.

    The training loop stays as it is, and so do the model's class, parameters and state_dict:

        packed = pack_gradients(model)
        for batch in micro_batches:
            loss(model(batch)).backward()       # the first overwrites, the others add inside the product
        packed.clip_norm_(1.0)                  # one pass, in place of torch.nn.utils.clip_grad_norm_
        optimizer.step()                        # any optimizer: `.grad` is where it always is
        optimizer.zero_grad()                   # set_to_none=True or False

    `nn.Linear`, `nn.Embedding`, the Conv1D of transformers, and `Dense` and `MLP` of `leangrad.nn` write into the
    buffer without a temporary. Other gradients arrive by one in-place add or copy. `packed.report()` says which is
    which.

    Bytes. Nothing more is kept for backward. The buffer is made of ranges of about `range_bytes`, each allocated when
    its first gradient arrives and freed with its last (None: one range for each device and dtype). While backward
    fills a range, at most that range stands above what plain gradients would hold; once gradients stand from an
    earlier micro-batch, nothing does, and the temporary of each weight's size that plain accumulation needs is gone.
    A gradient that you keep beyond `zero_grad` stays as it was, and keeps its whole range alive; a clone does not.

    `dtype` accumulates in a wider dtype, such as float32 for bfloat16 parameters. `.grad` then has that dtype; call
    `packed.cast_()` before the step of an optimizer that wants its parameter's dtype (all of torch's but plain SGD), or
    `packed.clip_norm_(max_norm, cast=True)`, which clips and casts in one pass.

    Parameters on several devices have ranges on each. Under DistributedDataParallel pack before or after wrapping; with
    `gradient_as_bucket_view=True` the gradients end in its buckets and are copied back for `clip_norm_` and the like,
    so `packed.reducing()` in place of the wrapper saves a buffer. Parameters that `fully_shard` has sharded stay plain:
    their gradients are packed by FSDP2 itself; pack after sharding, and `norm` and `clip_norm_` serve them too.

    Tensor hooks, post-accumulate hooks, retain_graph, create_graph and `torch.autograd.grad` work as in plain. The
    one thing that does not see a written gradient is a prehook on a parameter's AccumulateGrad node. Several threads
    may run backward at once, but on a CPU not over a weight that both its layer and a plain op use (tied weights).

    With `LEANGRAD_DISABLE=1` the layers compute plain gradients, which are then copied into the buffer.

    Raises TypeError for what is no module, and ValueError for a model that has no trainable parameter, is packed
    already, or has sparse embeddings.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> packed = pack_gradients(model)
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> packed.report()["0.weight"].how
    'written'
    >>> len(packed.flats())
    1
    >>> bool(packed.clip_norm_(0.1) > 0.1), round(packed.norm().item(), 4)
    (True, 0.1)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"pack_gradients() expects an nn.Module, whose gradients it packs, got {type(model).__name__}; "
            "pass the model, not its parameters"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.float32, or None, got {type(dtype).__name__}")
    if range_bytes is not None and range_bytes <= 0:
        raise ValueError(f"range_bytes must be positive or None, got {range_bytes}")
    return PackedGradients(model, dtype, range_bytes)
