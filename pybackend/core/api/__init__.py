"""Calls for users: train, evaluate, predict, run, plan."""
