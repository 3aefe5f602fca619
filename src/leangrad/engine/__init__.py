"""What the blocks of `leangrad.nn` and the tape are built from: who owns a buffer, and how gradients are moved.

Read in this order: ``ownership`` (may this gradient be overwritten?), ``grad_buffer`` (gradients that count the claims
on their memory, and a pool of dead memory), ``var`` (a value on a tape), ``tape_ops`` and ``custom_step`` (backward of
the steps of a tape), ``single_node`` (many ops as one autograd node). ``tape`` puts them together, and
`leangrad.tape` is its public path.
"""
