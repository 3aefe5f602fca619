"""What one recorded step shows, and how later steps follow it.

Read in this order: ``recorder`` (listens to a step, and writes it down as a graph for ``leangrad.policy``, which says
what to keep), ``items`` (the tensors in that graph), ``gradients`` and ``scratch`` (what backward holds beside saved
tensors), ``recorded_step`` (what later steps do then; ``entries`` are its lines in the summary), ``trace`` (the calls
of the recorded step, and whether a later step is like it).
"""
