"""Runs the rounds of federated learning, in this process or on Ray. Begin with README.md in this folder."""
