"""`pack_gradients`, the entry point, and `PackedGradients` with its passes over the whole buffer."""

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

#: Gradients are allocated in ranges of about this size: small enough that a range that is only partly filled does not
#: raise the peak, large enough that a pass over all ranges is a few large kernels.
RANGE_BYTES = 32 * 1024 * 1024

#: On a GPU, at most this many bytes of wider gradients are cast in one call; during it both forms are allocated.
CAST_BYTES = 512 * 1024 * 1024


class PackedGradients:
    """The packed gradients of one model; `pack_gradients` returns it."""

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
                parameter.grad_dtype = None  # any dtype: autograd adds in place to the `.grad` that is there

    def unpack(self) -> None:
        """Restore the forwards of the model's classes. `.grad` stays, but is cast to the dtype of its parameter."""
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
        """Returns the ranges that hold a gradient, as vectors in parameter order; zero where there is no gradient.

        Each vector is the memory of the gradients themselves: a change of it changes them.
        """
        self._check_parameters()
        flats = self._settled()
        for range_ in self.ranges:
            range_.forget_zeros()  # the caller may write anywhere in the vectors
        return flats

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Returns the 2-norm of all gradients together, in float32 or wider; as `torch.nn.utils.get_total_norm`."""
        norm = self._norm(self._settled())
        self._check_parameters()
        return norm

    @torch.no_grad()
    def clip_norm_(self, max_norm: float, *, cast: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_(parameters, max_norm)`: returns the norm before clipping.

        The norm is float32 or wider, and so is the factor on a GPU with Triton; torch rounds both to the dtype of the
        gradients. `cast=True` also casts the gradients, as `cast_()` does, in the pass that scales them.
        """
        norm = self._norm(self._settled())
        self._check_parameters()  # after the norm was launched: the GPU computes it meanwhile
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
        """Whether no gradient holds an Inf or a NaN, as a tensor of one bool; it does not synchronize with a GPU."""
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

        Casts range by range, on a GPU up to an eighth of all bytes in one call, so that no more than that is allocated
        in both dtypes at a time. After `zero_grad` gradients are accumulated in the wider dtype again.
        """
        self._check_parameters()
        self._settled()
        self._cast(None)

    def _settled(self) -> list[Tensor]:
        """Returns every allocated range as a vector, with zeros wherever there is no gradient."""
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
        """Cast the ranges that have a wider dtype than their parameters, times `factor`; returns the other vectors."""
        owners = {slot: parameter for parameter, slot in self._pairs}
        standing = [range_ for range_ in self.ranges if range_.base() is not None]
        for group in cast_groups([range_ for range_ in standing if range_.dtype != range_.parameter_dtype]):
            flats = [flat for range_ in group if (flat := range_.flat()) is not None]
            for range_, narrowed in zip(group, narrow(flats, group[0].parameter_dtype, factor), strict=True):
                for slot in range_.slots:
                    parameter = owners[slot]
                    if parameter.grad is not None:
                        parameter.grad = None  # a `.grad` of the wider dtype cannot be replaced in one assignment
                        parameter.grad = narrowed.as_strided(slot.shape, slot.stride, slot.offset)
        return [flat for range_ in standing if (flat := range_.flat()) is not None]

    # -- processes ----------------------------------------------------------------------------------------------

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Average all gradients over the processes of `group`. `reducing` does the same, overlapped with backward."""
        with self.reducing(group):
            pass

    @contextmanager
    def reducing(self, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Average the gradients over the processes of `group` while the backward inside the context is still running.

        Each range is sent when it is full. Run earlier micro-batches before, outside of the context; one backward
        inside:

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
        """Returns how each parameter's gradient arrived: written, added, copied or plain, and why."""
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
    """Returns the ranges in groups that are cast in one call each.

    A group has one range; on a GPU it has as many as fit into an eighth of all bytes and `CAST_BYTES`, because a call
    takes the host as long as a range takes the device.
    """
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

    Bytes. Nothing more is kept for backward. The buffer consists of ranges of about `range_bytes`, each allocated when
    its first gradient arrives and freed with its last (None: one range for each device and dtype). While backward
    fills a range, memory is at most that range above what plain gradients would use. Once there are gradients of an
    earlier micro-batch, it is not above at all, and the temporary of each weight's size that plain accumulation needs
    is not allocated. A gradient that you keep beyond `zero_grad` stays as it was, and keeps its whole range allocated;
    a clone does not.

    `dtype` accumulates in a wider dtype, such as float32 for bfloat16 parameters. `.grad` then has that dtype. Before
    the step of an optimizer that needs its parameter's dtype (all of torch's but plain SGD) call `packed.cast_()`, or
    `packed.clip_norm_(max_norm, cast=True)`, which clips and casts in one pass.

    Parameters on several devices have ranges on each. Under DistributedDataParallel pack before or after wrapping; with
    `gradient_as_bucket_view=True` the gradients end up in its buckets and are copied back for `clip_norm_` and the
    like, so `packed.reducing()` instead of the wrapper saves a buffer. Parameters that `fully_shard` has sharded stay
    plain: FSDP2 itself packs their gradients. Pack after sharding; `norm` and `clip_norm_` then include them.

    Tensor hooks, post-accumulate hooks, retain_graph, create_graph and `torch.autograd.grad` work as in plain PyTorch.
    Only a prehook on a parameter's AccumulateGrad node does not see a gradient that was written. Several threads may
    run backward at once, but on a CPU not over a weight that both its layer and a plain op use (tied weights).

    With `LEANGRAD_DISABLE=1` the layers compute plain gradients, which are then copied into the buffer.

    Raises TypeError if `model` is no module, and ValueError if it has no trainable parameter, is packed already, or has
    sparse embeddings.

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
