"""Replays a chain of pointwise ops in a recipe as one Triton kernel.

No folder below imports this one: ``fused.register`` enters it in ``replayers``, where rebuilds look it up.

Read in this order: ``fused`` (what is replayed as one kernel, and when), ``chain`` (the ops of one chain), ``pattern``
and ``matcher`` (recognize a chain that was seen before), ``fused_plan`` (the program of a chain: proven and run),
``builder`` and ``lowering`` (how each op is written in a program), ``bit_exactness`` (whether an op has ATen's bits on
this machine).
"""
