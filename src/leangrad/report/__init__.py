"""The report of where the memory of a training step goes: in sentences, as text, as JSON and as a page."""

from leangrad.report.report import Report, StepRecord

__all__ = ["Report", "StepRecord"]
