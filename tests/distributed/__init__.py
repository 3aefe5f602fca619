"""Real processes over gloo: lean models under FSDP2, DDP and tensor parallelism."""
