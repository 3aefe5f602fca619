"""What autograd's nodes forget, seen as it happens: calls of torch functions, changes in place, random numbers, hooks.

Read in this order: ``active_region`` (the region that is open in this thread), ``function_mode`` and ``call_args`` (one
call, as its handler sees it), ``handlers`` (constants that nodes forget), ``mutation`` (changes in place),
``random_ops`` and ``rng`` (dropout and noise), ``hooks`` (what autograd hands over), ``checkpoint`` (segments that
backward runs again).
"""
