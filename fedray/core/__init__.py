"""What every part of fedray builds on: models as flat rows, mini-batches, tasks, random numbers, and the tree along
which sums over clients are taken. This package uses numpy and torch, and does not import Ray."""
