"""Makes an experiment from a configuration: what a run is, once everything is resolved."""
