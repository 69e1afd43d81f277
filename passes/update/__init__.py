"""Passes over Dynamo's graph of an optimizer's update: write FP8 weights and moments, skip nonfinite steps."""
