"""Sources, partitioners and the federated data set: numpy alone, no torch and no Ray."""
