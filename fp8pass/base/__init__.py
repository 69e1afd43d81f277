"""What everything else may import: names of torch, errors, checked fields, scales of FP8 as plain numbers."""
