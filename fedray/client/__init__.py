"""What a client does in a phase (a part of a round): its mini-batches, its losses and its steps."""
