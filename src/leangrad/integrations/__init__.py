"""leangrad in the trainers of other libraries. Each library is imported only by the module of the same name.

transformers     `LeanCallback`, for Hugging Face's Trainer and for trainers built on it, such as TRL's
lightning        `Lean`, a callback for Lightning's Trainer, under the name ``lightning`` or ``pytorch_lightning``
figures          what both callbacks log: the share of memory saved, and the peak
library          imports a library, or raises an error if it is missing or too old

`attach/training_step.py` applies `lean` to a LightningModule. Accelerate, PEFT, Fabric and diffusers need no module
here: docs/ has the lines to copy.
"""

import importlib
from types import ModuleType

__all__ = ["lightning", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"leangrad.integrations.{name}")
    raise AttributeError(f"module 'leangrad.integrations' has no attribute {name!r}")
