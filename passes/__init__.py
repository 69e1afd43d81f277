"""A folder for each stage of compilation, and a file for each pass. `fp8pass/compiler/order.py` orders them."""
