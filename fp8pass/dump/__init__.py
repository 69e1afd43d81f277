"""Write graphs as executable Python files, and run these."""
