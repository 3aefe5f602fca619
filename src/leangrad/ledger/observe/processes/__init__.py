"""What torch.distributed does to tensors while a region is open: it gathers parameters, and collectives write."""
