"""Define what every folder may import: names of torch, errors, checked fields, scales of FP8 as plain numbers."""
