"""Recording one step, and the data that later steps take from it.

Read in this order: ``recorder`` (records a step), ``items`` and ``reads`` (the tensors of the step and the order in
which backward reads them; together the graph for ``leangrad.policy``, which chooses what to keep), ``gradients`` and
``scratch`` (the memory that backward uses beside saved tensors), ``recorded_step`` (the recorded step as plain data,
and the decisions of later steps; ``entries`` are its lines in the summary), ``trace`` (the calls of the recorded step,
and whether a later step makes the same calls), ``early_end`` (where the function mode of a later step is removed before
forward has ended), ``timing`` (the time that each rebuild takes).
"""
