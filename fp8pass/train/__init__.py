"""Train a whole step: `fp8pass.train_step`, `fp8pass.calibrate`, and updates within the backward."""
