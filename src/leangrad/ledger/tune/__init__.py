"""The search for a plan that meets what the user asked for: a memory budget, or a bound on the time.

Read in this order: ``goal`` (what the user asked for, and how one step is to run), ``peaks`` (measured and predicted
peaks of steps; the figures come from the allocator's counters and from ``history`` on a GPU, and from ``meter`` on a
CPU), ``plan_search`` (what both searches share: plans, and steps that are timed), ``budget_search``,
``slowdown_search`` with ``ratios`` (how a plan is timed) and ``candidate_plans`` (which plan is tried next), ``tuner``.
A ledger without a goal uses ``host_limit`` alone.
"""
