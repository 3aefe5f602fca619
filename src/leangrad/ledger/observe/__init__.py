"""Records while forward runs what autograd nodes do not store: constants, in-place changes and random state.

Read in this order: ``active_region`` (the region that is open in this thread), ``function_mode`` and ``call_args`` (one
call, as its handler sees it), ``handlers`` (constants that nodes do not store), ``mutation`` (in-place changes),
``unseen_writes`` (static check for writes past a version counter), ``random_ops`` and ``rng`` (dropout and random
state), ``hooks`` (saved-tensor hooks), ``checkpoint`` (segments that backward runs again), ``processes`` (what
torch.distributed does to tensors).
"""
