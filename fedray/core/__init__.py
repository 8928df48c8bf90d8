"""What a client computes: data and batches, gradients, the local optimizer, sums over clients, and random numbers. It
uses numpy and torch, and knows nothing of Ray."""
