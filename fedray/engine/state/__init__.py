"""What a run keeps: clients' states, the server's, and checkpoints."""
