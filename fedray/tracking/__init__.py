"""Records of a run: its folder, TensorBoard events, costs, and the progress that is shown."""
