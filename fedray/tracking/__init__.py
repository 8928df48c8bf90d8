"""What a run leaves behind and shows: the run folder, TensorBoard events, costs, progress."""
