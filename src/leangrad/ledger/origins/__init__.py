"""Where tensors come from: the walk along autograd's graph, and how each op replays.

Read in this order: ``rules`` (how each op replays), ``functions`` (our own autograd Functions), ``rule_builder`` (a
rule as a function that reads one node), ``graph_walk`` (from a tensor back to what is kept), ``upstream_anchors``
(outputs of products, which a recipe may start from in the stead of something larger).
"""
