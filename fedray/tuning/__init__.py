"""Hyper-parameter search: spaces, trials on Ray Tune, studies in Optuna's storage."""
