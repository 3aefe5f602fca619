"""The compiled engine: ``torch.compile(model, backend="leangrad")``.

Inductor generates the code, as it does for ``backend="inductor"``; only what forward hands to backward is chosen by
``leangrad.policy``, and a loss of logits runs without them. Read ``backend`` (options, and what is compiled how),
``partitioner`` (the choice), ``joint_graph`` (AOTAutograd's graph as the policy sees it), ``logits_chain`` (logits in a
graph), ``fused_loss`` (losses that need none), ``lazy_outputs`` (logits that are returned), ``side_outputs`` (what else
is returned beside a loss, and its gradient of zeros), ``layouts`` (memory formats), ``dropout`` (how exact graphs keep
its mask alone), ``first_step`` (the peak that the summary tells on a GPU). Torch's private names are in
``leangrad._torch.compiler``.
"""

from leangrad.compiled.backend import compile_lean, summary

__all__ = ["compile_lean", "summary"]
