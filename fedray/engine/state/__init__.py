"""The state of a run: the clients' states, the server's state, and checkpoints."""
