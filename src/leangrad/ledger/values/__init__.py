"""What backward may ask for: a kept tensor, a recipe for one, a view of either, or a shape alone.

Read in this order: ``saved`` (the handle that autograd holds for a saved tensor), ``value`` (kept or rebuilt), and what
it asks: ``pending_inputs`` (recipes that wait for an output that nobody has kept), ``waypoints`` (long recipes),
``rebuilt_cache`` and ``inplace_variants``; ``saved_view`` and ``cast`` (short forms for views and for parameters in
autocast's dtype), ``shape_only`` (what backward reads only the shape of), ``pending_save`` (a tensor not decided yet),
``node_metadata`` (what is written into autograd's nodes).
"""
