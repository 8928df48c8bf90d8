"""How a data set is spread over clients."""
