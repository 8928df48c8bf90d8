"""Makes an experiment from a configuration: the complete description of a run, with all defaults resolved."""
