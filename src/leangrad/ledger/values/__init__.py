"""What a saved-tensor hook may return: a kept tensor, a recipe for one, a view of either, or only a shape.

Read in this order: ``saved`` (what autograd holds in place of a saved tensor), ``value`` (a tensor that is kept or
rebuilt) and what it uses: ``pending_inputs`` (recipes that wait for an output that is not kept yet) and the folder
``rebuild``; ``saved_view`` and ``cast`` (short forms for views and for parameters in autocast's dtype), ``shape_only``
(saved tensors of which backward reads only the shape), ``pending_save`` (saved tensors that are not decided yet),
``node_metadata`` (what the ledger stores in autograd's nodes).
"""
