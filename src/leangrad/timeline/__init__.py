"""The memory of a step over time: its allocations and releases, and the category of each block."""
