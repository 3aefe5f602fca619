"""What torch.distributed does to tensors while a region is open: parameters that are gathered, collectives that write."""
