"""A chain of pointwise ops in a recipe, replayed as one kernel. Nothing below imports this room: it registers itself.

Read in this order: ``fused`` (what is replayed so, and when), ``chain`` (the ops of one), ``pattern`` and ``matcher``
(a chain that was seen before), ``fused_plan`` (its program, proven and run), ``builder`` and ``lowering`` (how each op
is written in a program), ``bit_exactness`` (whether an op has the bits of ATen's here).
"""
