"""The repeated modules of a model, such as the blocks of a transformer: checkpoints are usually put around these."""

from collections import Counter
from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_each", "describe_repeated", "repeated_modules"]

_LISTS = (nn.ModuleList, nn.ModuleDict)  # they have no forward


def repeated_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules whose class occurs several times at one depth, by their names.

    A module counts if it has parameters, and either submodules or a class that is not torch's: a checkpoint around a
    single layer of torch saves nothing. A Sequential counts only if it has several children and none of them could
    count itself: the stages of a ResNet do not count, its blocks do.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = nn.Linear(4, 4)
    >>> list(repeated_modules(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(), Block()))))
    ['1.0', '1.1']
    """
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    level = list(_children("", model))
    while level:
        counts = Counter(type(module) for _, module in level if _may_be_block(module))
        below: list[tuple[str, nn.Module]] = []
        for name, module in level:
            if module in seen:  # registered under a second name
                continue
            seen.add(module)
            if counts[type(module)] > 1 and _may_be_block(module):
                found[name] = module
            else:
                below += _children(name, module)
        level = below
    return found


def _children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        yield f"{name}.{key}" if name else key, child


def _may_be_block(module: nn.Module) -> bool:
    if isinstance(module, _LISTS) or next(module.parameters(), None) is None:
        return False
    if type(module) is nn.Sequential:
        return len(module) > 1 and not any(_may_be_block(child) for child in module)
    return next(module.children(), None) is not None or not type(module).__module__.startswith("torch.")


def checkpoint_each(modules: dict[str, nn.Module]) -> None:
    """Put a non-reentrant checkpoint around the forward of each module."""
    for module in modules.values():
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def describe_repeated(modules: dict[str, nn.Module]) -> str:
    """Return a description with the number of modules of each class and the first name: ``12 × Block, from h.0 on``."""
    counts = Counter(type(module).__name__ for module in modules.values())
    return " and ".join(f"{count} × {name}" for name, count in counts.items()) + f", from {next(iter(modules))} on"
