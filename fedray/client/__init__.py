"""What a client does in a phase: its mini-batches, its losses and its steps."""
