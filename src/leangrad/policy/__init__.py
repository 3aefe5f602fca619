"""The policy: what is kept from forward to backward and what is made again, for any engine.

It knows a step only as a plain graph of values (``graph``) and imports nothing of torch. An engine has an adapter that
writes its step down as such a graph: ``leangrad.compiled.joint_graph`` does it for the graphs of AOTAutograd,
``leangrad.ledger.learn.reads`` for the recorded step of a lean model, ``leangrad.floor`` for all that eager PyTorch
runs.

Read in this order: ``graph`` (values, what they take and what they are made from), ``ops`` (which ops are never run
twice, by name), ``work`` (what an op takes), ``max_flow`` and ``cut`` (the cheapest set of values to keep), ``kernels``
(which values a code generator writes to memory), ``peak`` (what a compiled step holds at its worst moment under a cut),
``replay`` (the same for an eager backward), ``chains`` (where chains of values that are made again end), ``choice``
(the cut that an engine takes).

heavy       an op that never runs twice: a product, a convolution, an attention, a sort, a collective
source      an op that draws random numbers; it never runs twice either
fixed       a value that is not made again in backward: the output of a heavy op or a source, a small statistic
kept        a value that is held from forward to backward
needed      a value of forward that some op of backward reads
price       the bytes that are moved to make a value again
floor       the bytes of the cheapest cut: the fewest that can be kept with no heavy op run twice
"""
