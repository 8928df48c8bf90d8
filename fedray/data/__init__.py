"""Sources, partitioners and the federated data set: numpy and pandas alone, no torch and no Ray."""
