"""Benchmarks under DDP and FSDP2: the memory of each rank, with real processes and simulated."""
