"""Flat parameter vectors, chunk gradients, the local training loop and seeds: numpy and torch, no Ray."""
