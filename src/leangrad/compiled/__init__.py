"""The compiled engine: ``torch.compile(model, backend="leangrad")``.

Inductor generates the code, as it does for ``backend="inductor"``. Two things differ: ``leangrad.policy`` chooses which
values forward saves for backward, and the cross entropy of a projection to a vocabulary is computed without its logits.

The modules, in reading order: ``backend`` (the options, and how a graph is compiled), ``partitioner`` (AOTAutograd's
partitioner with the policy's choice), ``joint_graph`` (converts AOTAutograd's graph to the policy's), ``logits_chain``
(finds logits in a captured graph), ``fused_loss`` (replaces losses by an op that needs no logits), ``lazy_outputs``
(logits that a graph returns), ``side_outputs`` (other large outputs beside a loss, whose gradients autograd would fill
with zeros), ``convolutions`` (memory formats, and the two gradients of a convolution), ``copies`` (readers that compute
a value once more), ``dropout`` (how an exact graph saves only the mask), ``first_step`` (the measured peak that the
summary reports on a GPU). Torch's private names are in ``leangrad._torch.compiler``.
"""

from leangrad.compiled.backend import compile_lean, summary

__all__ = ["compile_lean", "summary"]
