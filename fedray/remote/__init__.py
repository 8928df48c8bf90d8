"""Keeps results at a URI, such as ``s3://bucket/runs``: runs and sweeps work in a folder of their machine, and a thread
brings the URI up to date."""
