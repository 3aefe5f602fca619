"""The public path to the tape: a Wengert list whose backward moves gradients. See `leangrad.engine.tape`."""

from leangrad.engine.tape import Tape, Var

__all__ = ["Tape", "Var"]
