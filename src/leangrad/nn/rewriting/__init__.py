"""Rewrites the forward of a module by tracing it, and runs the original where the trace may not hold.

``trace`` runs forward once on stand-ins for tensors (``stand_ins``) and records its operations. What else decides what
forward does is noted by ``reads`` (attributes, as ``guards`` that are compared in each call) or refused by
``functions``, which looks at each function before it runs, and ``source_check``, which reads its source. ``frames``
tells the model's code from torch's. ``classes`` makes the class with the rewritten forward; ``norm_act`` finds norms
whose own forward applies an activation; ``activations`` says which one a module or a node computes.
"""
