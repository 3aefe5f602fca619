"""What one recorded step shows, and how later steps follow it.

Read in this order: ``recorder`` (the step that is recorded), ``plan`` (where to cut a residual chain, by the simulated
peak), ``gradients`` and ``scratch`` (what backward holds beside saved tensors), ``trace`` (the calls of the recorded
step, and whether a later step is like it).
"""
