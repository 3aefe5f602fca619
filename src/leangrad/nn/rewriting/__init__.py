"""Rewrites the forward of a module by tracing it, and runs the original where the trace may not hold.

``trace`` runs forward once on stand-ins for tensors and records its operations, and every attribute that it read;
``source_check`` looks in the source of the functions that ran for what a trace does not show; ``classes`` makes the
class with the rewritten forward; ``norm_act`` finds norms whose own forward applies an activation; ``activations`` says
which one a module or a node computes.
"""
