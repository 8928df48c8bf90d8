"""Makes pages about one run, a sweep or a suite (``fedray report``)."""
