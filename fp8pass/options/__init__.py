"""Read and check the user's options: `Config`, environment variables, name patterns, and the overrides of bisect."""
