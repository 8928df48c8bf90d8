"""How the time, the bytes and the memory of a round grow, and a model of its time (``analysis/scaling.py``)."""
