"""What a cluster's faults cost a run; ``analysis/cluster_faults.py`` is the program."""
