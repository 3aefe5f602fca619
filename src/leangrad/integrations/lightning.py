"""`Lean`: leangrad as a callback of Lightning's Trainer, for the package ``lightning`` or ``pytorch_lightning``.

    trainer = Trainer(callbacks=[Lean()])

`leangrad.lean(model)` before `trainer.fit(model)` does the same; `attach/training_step.py` explains how it applies to
`training_step`. The callback also logs the share of memory saved, and undoes `lean` when `fit` ends.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from typing import Any

from torch import nn

from leangrad.integrations.figures import lean_figures
from leangrad.integrations.library import require
from leangrad.lean import is_lean, lean, plain

__all__ = ["Lean"]

PACKAGES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}  # package by module name
MINIMUM = "2.5"


def _callback_classes() -> tuple[type, ...]:
    """Return the Callback class of each Lightning package that the program has imported.

    If it has imported none, that of the installed package.
    """
    names = [name for name in PACKAGES if sys.modules.get(name) is not None]
    if not names:
        installed = (name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None)
        names = [next(installed, "lightning.pytorch")]
    user = "leangrad.integrations.lightning"
    return tuple(require(name, MINIMUM, user=user, package=PACKAGES[name]).Callback for name in names)


_classes: dict[tuple[type, ...], type] = {}


def _class_for(*bases: type) -> type:
    """Return a subclass of ``bases`` with the name and docstring of the first: one class for each tuple of bases."""
    kind = bases[0]
    if bases not in _classes:
        _classes[bases] = type(kind.__name__, bases, {"__module__": kind.__module__, "__doc__": kind.__doc__})
    return _classes[bases]


class Lean(*_callback_classes()):  # type: ignore[misc]
    """Makes a LightningModule lean while ``trainer.fit`` runs; losses and gradients stay the same.

    settings: those of ``leangrad.lean``: ``budget="20GB"``, ``slowdown=1.1``, ``exact=False``, ...

    With automatic optimization the whole ``training_step`` is lean, including the loss; with manual optimization each
    submodule that it calls is lean. The callback logs ``lean_saved_share``, the share of the bytes that plain PyTorch
    keeps from forward to backward and lean does not, and on a GPU ``peak_memory_bytes``, torch's own peak, which it
    does not reset. When ``fit`` ends the callback undoes ``lean``; checkpoints equal those of the plain model at any
    time. A model that is already lean keeps its own settings. For a compiled module the callback does nothing but warn
    what to do instead.

    >>> from lightning.pytorch import Trainer  # doctest: +SKIP
    >>> Trainer(callbacks=[Lean(slowdown=1.1)]).fit(model, data)  # doctest: +SKIP
    """

    def __new__(cls, **settings: Any) -> Lean:
        """Make an instance that is also a Callback of each Lightning package that the program uses."""
        bases = [base for base in _callback_classes() if not issubclass(cls, base)]
        made: Lean = object.__new__(_class_for(cls, *bases) if bases else cls)
        return made

    def __init__(self, **settings: Any) -> None:
        lean(nn.Identity(), **settings)  # raises an error for wrong settings now, not when training begins
        self.settings = settings
        self._is_ours = False  # whether this callback made the model lean

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings only: a strategy that spawns processes sends its callbacks to them."""
        kind = type(self)
        named = kind.__bases__[0] if kind in _classes.values() else kind  # a class that pickle finds by its name
        return functools.partial(named, **self.settings), ()

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Make the model lean when ``fit`` begins."""
        if stage != "fit":
            return
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            warnings.warn(
                "the Lean callback does nothing for a compiled LightningModule; compile its submodules instead, by "
                'module.part.compile(backend="leangrad"), which are then lean by themselves',
                stacklevel=2,
            )
        elif not is_lean(pl_module):
            lean(pl_module, **self.settings)
            self._is_ours = True
        elif self.settings and not self._is_ours:
            warnings.warn(
                "this LightningModule is lean already and stays as it is: the settings of the Lean callback are not "
                "used; give them to one of the two",
                stacklevel=2,
            )

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Make the model lean again, with the layers that its ``setup`` and ``configure_model`` have made since."""
        if self._is_ours:
            lean(pl_module, **self.settings)

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Undo ``lean`` when ``fit`` ends."""
        if stage == "fit":
            self._give_back(pl_module)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Undo ``lean`` when an exception ends ``fit``: then Lightning does not call ``teardown``."""
        self._give_back(pl_module)

    def _give_back(self, pl_module: nn.Module) -> None:
        if self._is_ours:
            self._is_ours = False
            plain(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the figures at the steps that the trainer logs."""
        if is_lean(pl_module) and trainer.global_step % trainer.log_every_n_steps == 0:
            figures = lean_figures(pl_module)
            pl_module.log_dict(figures, on_step=True, on_epoch=False, rank_zero_only=True, batch_size=1)
