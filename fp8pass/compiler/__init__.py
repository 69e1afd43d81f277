"""Compile a graph of Dynamo's: order and run the passes, lower it, call it, and recompile after a fault."""
