"""Looks at each function that runs while a forward is traced, before it runs: `Functions`."""

from __future__ import annotations

import inspect
import os
import sys
from types import CodeType, FrameType
from typing import Any

from torch import fx, nn

from leangrad.ledger.gc_pause import GcPause
from leangrad.nn.rewriting.frames import TORCH, UntraceableError, is_of_model, is_of_torch, is_ours
from leangrad.nn.rewriting.guards import Global
from leangrad.nn.rewriting.source_check import global_functions, why_not_traceable

__all__ = ["Functions"]

PLAIN_C = ("builtins", "math", "operator", "_operator", "itertools", "_functools", "torch")
ENTRIES = ("_run_forward", "_get_attribute")  # functions of this folder that run code of the model
SETS_NOTHING = ("is_scripting", "_assert")  # functions of torch that may be called without a tensor
CHECKPOINT = os.path.join("utils", "checkpoint.py")
FUNCTION = os.path.join("autograd", "function.py")
# What torch runs for an op while a dispatch mode is on.
OF_OPS = ("_library/", "_ops.py", "_compile.py", "utils/_python_dispatch.py")
DISPATCH = tuple(TORCH + path.replace("/", os.sep) for path in OF_OPS)


class Functions:
    """Raises UntraceableError in this thread, while it is entered, where a trace would lose what a function does.

    Garbage is not collected meanwhile: finalizers and callbacks of the collector would run as if forward called them.
    """

    def __init__(self) -> None:
        self._reason = ""
        self.globals: dict[tuple[str, str], Global] = {}
        self._seen: set[CodeType] = set()

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        if self._before is not None and not callable(self._before):
            raise UntraceableError("a profiler runs, which cannot be put aside while its forward is traced")
        self._pause = GcPause()
        sys.setprofile(self._watch)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)
        self._pause.end()
        if self._reason and error[0] is None:  # the error was raised where Python drops it, such as in `__del__`
            raise UntraceableError(self._reason)

    def _watch(self, frame: FrameType, event: str, arg: Any) -> None:
        try:
            self._check(frame, event, arg)
        except UntraceableError as error:
            self._reason = self._reason or str(error)
            raise

    def _check(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self._note_call(frame)
        elif event == "c_call" and is_of_model(frame) and not _is_plain_c(arg) and not _is_below_torch(frame):
            raise UntraceableError(f"its forward calls {arg!r}")

    def _note_call(self, frame: FrameType) -> None:
        code = frame.f_code
        if is_of_torch(frame):
            self._note_call_of_torch(frame)
        elif code not in self._seen and not is_ours(frame):
            if _is_below_torch(frame):
                if is_of_model(frame) and any(isinstance(value, fx.Proxy) for value in frame.f_locals.values()):
                    raise UntraceableError(f"its forward gives `{code.co_name}` to torch, which calls it")
                return
            if reason := why_not_traceable(code, frame.f_globals):
                raise UntraceableError(reason)
            self.note(code, frame.f_globals)

    def note(self, code: CodeType, scope: dict[str, Any]) -> None:
        """Note a function whose source was read, and the functions that it finds by global names."""
        self._seen |= {code, *_nested(code)}
        for found in global_functions(code, scope):
            try:
                is_found = found.holds()
            except ImportError:
                is_found = False
            if not is_found:
                raise UntraceableError(f"its forward uses `{found.name}`, which no module has under this name")
            self.globals[found.module, found.name] = found

    def _note_call_of_torch(self, frame: FrameType) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith(CHECKPOINT):
            raise UntraceableError("its forward uses torch.utils.checkpoint")
        if file.endswith(FUNCTION) and name == "apply":
            raise UntraceableError("its forward uses an autograd function, whose backward a trace does not see")
        caller = frame.f_back
        if file.startswith(DISPATCH):
            return  # of an op on real tensors, which is refused by itself
        if name in SETS_NOTHING or caller is None or not is_of_model(caller) or _is_below_torch(caller):
            return
        if not any(map(_has_stand_in, frame.f_locals.values())):
            raise UntraceableError(f"its forward calls `{name}` of torch, which gets no tensor")


def _has_stand_in(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_stand_in, value))
    if isinstance(value, dict):
        return any(map(_has_stand_in, value.values()))
    return isinstance(value, (fx.Proxy, nn.Module))


def _is_below_torch(frame: FrameType) -> bool:
    """Whether torch, or code of this folder other than its ENTRIES, is among the callers of a frame."""
    caller = frame.f_back
    while caller is not None and not (is_ours(caller) and caller.f_code.co_name in ENTRIES):
        if is_of_torch(caller) or is_ours(caller):
            return True
        caller = caller.f_back
    return False


def _nested(code: CodeType) -> set[CodeType]:
    """Returns the code of functions and comprehensions inside of a function: these are read with it."""
    inner = {one for one in code.co_consts if isinstance(one, CodeType)}
    return inner.union(*map(_nested, inner))


def _is_plain_c(function: Any) -> bool:
    """Whether a C function is one of torch, or of Python's types and operators."""
    owner = getattr(function, "__self__", None) or getattr(function, "__objclass__", None)
    if owner is None or inspect.ismodule(owner):
        module = getattr(owner, "__name__", None) or getattr(function, "__module__", None) or "builtins"
    else:
        module = (owner if isinstance(owner, type) else type(owner)).__module__
    return module.partition(".")[0] in PLAIN_C or module in PLAIN_C
