"""The parts of Transformer blocks: a program on a tape, its steps, and attention whose saved tensors the tape holds.

Read in this order: ``program`` (a block on a tape, and the same on autograd's own ops), ``steps`` (its products and its
attention), ``input_transform`` (a norm or activation before a product, whose output is not kept),
``recorded_attention`` (attention by torch's kernels, without their saved tensors), ``masks``.
"""
