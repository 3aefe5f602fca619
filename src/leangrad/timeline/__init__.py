"""The memory of a step over time: its events, and what each block is."""
