"""The basis of the tape and of the blocks of `leangrad.nn`: checks who owns a buffer, and moves gradients.

Read in this order: ``ownership`` (whether a gradient may be overwritten), ``grad_buffer`` (gradients that count the
claims on their memory, and a pool of memory that can be reused), ``var`` (a value on a tape), ``tape_ops`` and
``custom_step`` (backward of the steps of a tape), ``single_node`` (many ops as one autograd node), ``chain`` (a chain
of layers for such a node). ``tape`` puts them together, and `leangrad.tape` is its public path.
"""
