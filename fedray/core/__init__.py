"""What all parts of fedray compute with: models as flat rows, mini-batches, tasks, random numbers, and the tree along
which sums over clients are taken. It uses numpy and torch, and knows nothing of Ray."""
