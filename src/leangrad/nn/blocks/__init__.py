"""What Transformer blocks are made of: a program on a tape, its steps, attention with all that it keeps in our hands.

Read in this order: ``program`` (a block on a tape, and the same on autograd's own ops), ``steps`` (its products and its
attention), ``input_transform`` (a norm or activation before a product, never stored), ``recorded_attention``,
``masks``.
"""
