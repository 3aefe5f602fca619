"""What one recorded step shows, and how later steps follow it.

Read in this order: ``recorder`` (listens to a step), ``items`` and ``reads`` (its tensors, and what backward reads of
them: the graph for ``leangrad.policy``, which says what to keep), ``gradients`` and ``scratch`` (what backward holds
beside saved tensors), ``recorded_step`` (what later steps do then; ``entries`` are its lines in the summary), ``trace``
(the calls of the recorded step, and whether a later step is like it).
"""
