"""Packed gradients: every `.grad` is a view of a flat buffer, and the op that computes it writes it there."""

from .gradients import PackedGradients, pack_gradients
from .modules import register_writer
from .report import Report, Row
from .slots import deliver

__all__ = ["PackedGradients", "Report", "Row", "deliver", "pack_gradients", "register_writer"]
