"""A training step of this library, DeepSpeed, FSDP2 and memory-mapped files."""
