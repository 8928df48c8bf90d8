"""The records of a run: its folder, TensorBoard events, costs, and the display of progress."""
