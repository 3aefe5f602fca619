"""`Lean`: leangrad as a callback of Lightning's Trainer, under the name ``lightning`` or ``pytorch_lightning``.

    trainer = Trainer(callbacks=[Lean()])

`leangrad.lean(model)` before `trainer.fit(model)` does the same: `attach/training_step.py` says how it reaches
`training_step`. The callback also logs what is saved, and gives the model back as it was when `fit` ends.
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

PACKAGES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}  # by the module's name
MINIMUM = "2.5"


def _callback_classes() -> tuple[type, ...]:
    """The Callback of each name of Lightning that the program has imported; of the one that is installed, if none."""
    names = [name for name in PACKAGES if sys.modules.get(name) is not None]
    if not names:
        installed = (name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None)
        names = [next(installed, "lightning.pytorch")]
    user = "leangrad.integrations.lightning"
    return tuple(require(name, MINIMUM, user=user, package=PACKAGES[name]).Callback for name in names)


_classes: dict[tuple[type, ...], type] = {}


def _class_for(*bases: type) -> type:
    """The first of these as a Callback of each name of Lightning, which has a class of its own."""
    kind = bases[0]
    if bases not in _classes:
        _classes[bases] = type(kind.__name__, bases, {"__module__": kind.__module__, "__doc__": kind.__doc__})
    return _classes[bases]


class Lean(*_callback_classes()):  # type: ignore[misc]
    """Makes a LightningModule lean while ``trainer.fit`` runs; losses and gradients stay the same.

    settings: those of ``leangrad.lean``: ``budget="20GB"``, ``slowdown=1.1``, ``exact=False``, ...

    With automatic optimization the whole ``training_step`` is lean, the loss included; with manual optimization each
    submodule that it calls. ``lean_saved_share`` is logged, of the bytes that plain keeps from forward to backward the
    share that is not kept, and on a GPU ``peak_memory_bytes``, torch's own peak, which is not reset. When ``fit`` ends
    the model is as it was; checkpoints are those of the plain model at any time. A model that is lean already stays as
    it is, with its own settings. For a compiled module the callback does nothing, and says what to do instead.

    >>> from lightning.pytorch import Trainer  # doctest: +SKIP
    >>> Trainer(callbacks=[Lean(slowdown=1.1)]).fit(model, data)  # doctest: +SKIP
    """

    def __new__(cls, **settings: Any) -> Lean:
        """One that is a Callback of the Lightning that the program uses."""
        bases = [base for base in _callback_classes() if not issubclass(cls, base)]
        made: Lean = object.__new__(_class_for(cls, *bases) if bases else cls)
        return made

    def __init__(self, **settings: Any) -> None:
        lean(nn.Identity(), **settings)  # what is wrong with them is said here, not when training begins
        self.settings = settings
        self._is_ours = False  # the model was made lean by this callback

    def __reduce__(self) -> tuple[Any, ...]:
        """A strategy that spawns processes sends its callbacks there."""
        kind = type(self)
        named = kind.__bases__[0] if kind in _classes.values() else kind  # one that can be found by its name
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
        """The same anew, with the layers that the module has made in ``setup`` and ``configure_model`` since then."""
        if self._is_ours:
            lean(pl_module, **self.settings)

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Give the model back as it was when ``fit`` ends."""
        if stage == "fit":
            self._give_back(pl_module)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """The same when ``fit`` ends by an exception, where Lightning calls no ``teardown``."""
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
