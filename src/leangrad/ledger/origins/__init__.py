"""Where tensors come from: the walk along autograd's graph, and how each op is replayed.

Read in this order: ``rules`` (how each op is replayed), ``functions`` (autograd Functions written in Python),
``rule_builder`` (compiles a rule into a function that reads one node), ``graph_walk`` (builds a recipe, from a saved
tensor back to kept tensors), ``shards`` (parameters that FSDP2 shards), ``upstream_anchors`` (outputs of products, and
tensors in fewer bits, that are kept instead of a larger tensor).
"""
