"""Let other software use fp8pass: training frameworks, servers that load its weights, other tracers."""
