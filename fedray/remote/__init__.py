"""Keeps results at a URI, such as ``s3://bucket/runs``: runs and sweeps work in a folder on their machine, and a thread
copies this folder to the URI."""
