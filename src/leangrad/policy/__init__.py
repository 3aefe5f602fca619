"""The policy: decides which values are kept from forward to backward and which are recomputed, for any engine.

It sees a step only as a plain graph of values (``graph``) and knows no torch. Each engine has an adapter
that converts its step to such a graph: ``leangrad.compiled.joint_graph`` for the graphs of AOTAutograd,
``leangrad.ledger.learn.reads`` for the recorded step of a lean model, ``leangrad.floor`` for all ops that eager PyTorch
runs.

Read in this order: ``graph`` (values, their bytes and their inputs), ``ops`` (which ops never run twice, by name, and
the work of an op), ``max_flow`` and ``cut`` (the cheapest set of values to keep), ``kernels`` (which values a code
generator writes to memory), ``copies`` (which readers compute a recomputed value once more), ``peak`` (the peak memory
of a compiled step under a cut), ``replay`` (the same for an eager backward), ``chains`` (where chains of recomputed
values end), ``choice`` (the cut that an engine uses), ``relax`` (cuts that keep more, within a budget or a time).

heavy       an op that never runs twice: a product, a convolution, an attention, a sort, a collective
source      an op that draws random numbers; it never runs twice either
fixed       a value that is not recomputed in backward: the output of a heavy op or a source, a small statistic
kept        a value that is held from forward to backward
standing    a value whose memory is allocated before and after the step anyway: a parameter, a batch
needed      a value of forward that some op of backward reads
price       the bytes that are moved to recompute a value
floor       the bytes of the cheapest cut: the fewest that can be kept with no heavy op run twice
"""
