"""From step to step towards what the user asked for: a budget of memory, or a bound on the time.

Read in this order: ``goal`` (what was asked, and how one step runs), ``peaks`` (what steps took, and what one is
foreseen to take; ``history`` tells it on a GPU, ``meter`` on a CPU), ``course`` (what both courses share: plans, and
steps that are timed), ``to_budget``, ``to_slowdown`` and ``pace`` (which plan is tried next for a bound on the time),
``tuner``.
"""
