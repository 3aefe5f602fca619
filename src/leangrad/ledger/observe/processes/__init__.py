"""What torch.distributed does to tensors while a region is open: FSDP2 gathers parameters, and collectives write."""
