"""`LeanCallback`: leangrad in Hugging Face's Trainer, and in trainers that are built on it, such as those of TRL.

    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[LeanCallback()])

`leangrad.lean(model)` before `Trainer(model, ...)` does the same. The callback also prints how it works together with
the trainer's other options, logs the share of memory saved, and undoes `lean` when training ends.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn

from leangrad import _torch
from leangrad.integrations.figures import lean_figures
from leangrad.integrations.library import require
from leangrad.lean import is_lean, lean, ledger_of, plain
from leangrad.loss.lazy import heads_of
from leangrad.sizes import size_text
from leangrad.switch import NAME, disabled

__all__ = ["LeanCallback"]

TrainerCallback = require("transformers", "4.56", user="leangrad.integrations.transformers").TrainerCallback

# Accelerate, which compiles for the Trainer, accepts only a fixed list of backends.
COMPILE = 'call model.compile(backend="leangrad") before the Trainer: the compiled model is then lean by itself'

# The callback that made a model lean, by model.
_owners: weakref.WeakKeyDictionary[nn.Module, LeanCallback] = weakref.WeakKeyDictionary()


def _checkpoints(args: Any, model: nn.Module) -> bool:
    """Whether the Trainer checkpoints blocks; before transformers 5.23 the option was called gradient checkpointing."""
    if hasattr(args, "activation_checkpointing"):
        return bool(args.activation_checkpointing or getattr(model, "is_activation_checkpointing", False))
    return bool(args.gradient_checkpointing or getattr(model, "is_gradient_checkpointing", False))


class LeanCallback(TrainerCallback):  # type: ignore[misc, valid-type]
    """Makes the model of a ``transformers.Trainer`` lean while it trains; losses and gradients stay the same.

    settings: those of ``leangrad.lean``: ``budget="20GB"``, ``slowdown=1.1``, ``exact=False``, ...

    When training begins the callback prints one line about what it does, also together with ``gradient_checkpointing``
    and Liger. It adds to the trainer's logs ``lean_saved_share``, the share of the bytes that plain PyTorch keeps from
    forward to backward and lean does not, and on a GPU ``peak_memory_bytes``, torch's own peak, which it does not
    reset. When training ends it undoes ``lean``; ``summary()`` still returns what was kept and why. A model that is
    already lean keeps its own settings. With ``torch.compile`` leangrad is a backend: call
    ``model.compile(backend="leangrad")`` and leave ``torch_compile`` off; the callback then does nothing.

    >>> from transformers import Trainer  # doctest: +SKIP
    >>> trainer = Trainer(model, args, train_dataset=dataset, callbacks=[LeanCallback()])  # doctest: +SKIP
    >>> LeanCallback(slowdown=1.1).summary()
    'no training has begun with this LeanCallback yet'
    """

    def __init__(self, **settings: Any) -> None:
        lean(nn.Identity(), **settings)  # raises an error for wrong settings now, not when training begins
        self.settings = settings
        self._model: weakref.ref[nn.Module] | None = None  # the model whose training this callback logs; None: none
        self._training: weakref.ref[Any] | None = None  # the TrainerState of that training
        self._summary = "no training has begun with this LeanCallback yet"

    def summary(self) -> str:
        """Return what is kept, rebuilt and shared, and why; after training, for the last step that was recorded."""
        model = None if self._model is None else self._model()
        return self._summary if model is None or not is_lean(model) else ledger_of(model).summary()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Make the model lean, and print one line about it."""
        if model is None:
            return
        told = self._begin(args, state, model)
        if told and state.is_world_process_zero:
            print(f"leangrad: {told}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Add the figures to the logs of training, for later callbacks and for ``state.log_history``."""
        model = None if self._model is None else self._model()
        if model is None or logs is None or not {"loss", "train_loss"} & logs.keys():
            return
        figures = lean_figures(model)
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Store the summary, and undo ``lean`` if this callback made the model lean."""
        self._summary, self._model = self.summary(), None
        if model is not None and _owners.get(model) is self:
            del _owners[model]
            plain(model)

    def _begin(self, args: Any, state: Any, model: nn.Module) -> str:
        self._model, self._training = None, weakref.ref(state)
        if args.torch_compile:
            warnings.warn(
                f"LeanCallback does nothing with torch_compile=True; leave that off, and {COMPILE}", stacklevel=2
            )
            return ""
        if _torch.is_compiled(model):
            return f"this model is compiled, so LeanCallback does nothing; if you have not done so, {COMPILE}"
        owner = _owners.get(model) if is_lean(model) else self
        if owner is not None and owner is not self:
            if owner._training is not None and owner._training() is state:
                return "this model has a LeanCallback already; the second one does nothing"
            owner = self  # an exception has ended the training of the other callback
        self._model = weakref.ref(model)
        if owner is None:
            unused = ", and the settings of LeanCallback are not used" if self.settings else ""
            return f"this model is lean already and stays as it is{unused}"
        lean(model, **self.settings)
        _owners[model] = self
        return self._sentence(args, model)

    def _how_much(self) -> str:
        if (budget := self.settings.get("budget")) is not None:
            return f"as much as fits into the budget of {budget if isinstance(budget, str) else size_text(budget)}"
        if (slowdown := self.settings.get("slowdown")) is not None:
            return f"as little as {slowdown} of plain's time allows"
        return "only what cannot be rebuilt"

    def _sentence(self, args: Any, model: nn.Module) -> str:
        if disabled():
            return f"leangrad is switched off by {NAME}, so {type(model).__name__} trains as without it"
        told = f"{type(model).__name__} keeps for backward {self._how_much()}"
        is_exact, heads = self.settings.get("exact", True), heads_of(model)
        if not is_exact and heads:
            told += "; the cross entropy is computed without its logits, with plain's error but not plain's bits"
        else:
            told += "; losses and gradients are plain's, bit for bit"
        if not is_exact and not heads:
            told += "; exact=False changes nothing, for no layer of this model is a projection to a large vocabulary"
        if _checkpoints(args, model):
            told += (
                "; gradient_checkpointing is on too: its segments are run again, lean, which takes no more memory and "
                "more time than lean alone"
            )
        if getattr(args, "use_liger_kernel", False):
            told += "; Liger's kernels keep what they need, all else is lean"
        return told
